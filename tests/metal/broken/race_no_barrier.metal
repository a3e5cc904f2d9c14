// Reads a neighbor's element of the tile without waiting for it.
threadgroup float tile[64];
const uint i = thread_position_in_threadgroup.x;
tile[i] = x[thread_position_in_grid.x]; // expect: race
simdgroup_barrier(mem_flags::mem_threadgroup);
out[thread_position_in_grid.x] = tile[63 - i]; // expect: race uninitialized-read
