// expect: recursion
// Two functions that call each other.
struct Parity {
  static bool even(int n) {
    return n == 0 ? true : odd(n - 1);
  }
  static bool odd(int n) {
    return n == 0 ? false : even(n - 1);
  }
};
const uint i = thread_position_in_grid.x;
out[i] = Parity::even(int(i % 4)) ? 1.0f : 0.0f;
