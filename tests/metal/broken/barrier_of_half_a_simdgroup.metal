// A simdgroup barrier that half of the lanes pass by.
const uint i = thread_position_in_grid.x;
out[i] = x[i];
if (thread_index_in_simdgroup < 16) {
  simdgroup_barrier(mem_flags::mem_threadgroup); // expect: barrier-divergence
}
