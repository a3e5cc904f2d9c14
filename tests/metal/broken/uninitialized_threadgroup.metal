// Half of the tile is never filled.
threadgroup float tile[64];
const uint i = thread_position_in_threadgroup.x;
if (i < 32) {
  tile[i] = x[i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
out[thread_position_in_grid.x] = tile[i]; // expect: uninitialized-read
