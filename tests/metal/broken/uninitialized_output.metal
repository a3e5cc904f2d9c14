// Takes the output for zero at the start.
const uint i = thread_position_in_grid.x;
const float before = out[i]; // expect: uninitialized-read
out[i] = before + x[i];
