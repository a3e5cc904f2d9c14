// Two branches come to one barrier, in a function that both call.
struct Wait {
  static void all() {
    threadgroup_barrier(mem_flags::mem_none); // expect: barrier-divergence
  }
};
const uint i = thread_position_in_grid.x;
out[i] = x[i];
if (i % 2 == 0) {
  Wait::all();
} else {
  Wait::all();
}
