// Ignores the strides of its input, and so reads what lies between its rows.
const uint i = thread_position_in_grid.x;
out[i] = strided[i]; // expect: out-of-range
