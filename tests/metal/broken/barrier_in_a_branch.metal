// Both branches have a barrier, but not the same one.
const uint i = thread_position_in_grid.x;
out[i] = x[i];
if (i % 2 == 0) {
  threadgroup_barrier(mem_flags::mem_threadgroup); // expect: barrier-divergence
} else {
  threadgroup_barrier(mem_flags::mem_threadgroup); // expect: barrier-divergence
}
