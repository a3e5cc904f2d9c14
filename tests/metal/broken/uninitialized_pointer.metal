// A pointer that is never set on one of two ways.
const uint i = thread_position_in_grid.x;
const device float* from;
if (i < 64) {
  from = x;
}
out[i] = from[i]; // expect: uninitialized-read
