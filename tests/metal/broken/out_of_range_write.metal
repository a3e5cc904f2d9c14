// Writes one element before the start as well.
const uint i = thread_position_in_grid.x;
auto before = out - 1;
before[i] = x[i]; // expect: out-of-range
if (i == 0) {
  out[threads_per_grid.x - 1] = x[i];
}
