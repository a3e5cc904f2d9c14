// expect: uninitialized-read
// A local without a value.
const uint i = thread_position_in_grid.x;
float total;
total += x[i];
out[i] = total;
