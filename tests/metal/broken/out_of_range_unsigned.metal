// An unsigned index that falls below zero becomes a very large one.
const uint i = thread_position_in_grid.x;
out[i] = x[i - 1]; // expect: out-of-range
