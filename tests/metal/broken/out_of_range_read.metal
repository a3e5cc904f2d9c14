// Reads one element past the end.
const uint i = thread_position_in_grid.x;
out[i] = x[i + 1]; // expect: out-of-range
