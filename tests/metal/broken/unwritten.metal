// expect: unwritten
// The guard stops one element too early.
const uint i = thread_position_in_grid.x;
if (i + 1 < threads_per_grid.x) {
  out[i] = x[i];
}
