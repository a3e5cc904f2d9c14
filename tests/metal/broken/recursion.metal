// expect: recursion
// A function that calls itself, in a local type since a body declares no functions.
struct Sum {
  static float down(int n) {
    return n == 0 ? 0.0f : 1.0f + down(n - 1);
  }
};
const uint i = thread_position_in_grid.x;
out[i] = Sum::down(int(i % 4));
