// Threads that have nothing to do return before the barrier.
threadgroup float tile[64];
const uint i = thread_position_in_threadgroup.x;
out[thread_position_in_grid.x] = 0.0f;
if (i >= 50) {
  return;
}
tile[i] = 1.0f;
threadgroup_barrier(mem_flags::mem_threadgroup); // expect: barrier-divergence
