// A tile with one element too few.
threadgroup float tile[63];
const uint i = thread_position_in_threadgroup.x;
tile[i] = x[thread_position_in_grid.x]; // expect: out-of-range
out[thread_position_in_grid.x] = x[thread_position_in_grid.x];
