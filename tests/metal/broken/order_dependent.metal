// expect: order-dependent
// Places are given out to whoever comes first.
threadgroup atomic_int next;
if (thread_index_in_threadgroup == 0) {
  atomic_store_explicit(&next, 0, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int place = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed);
const uint first = thread_position_in_grid.x - thread_position_in_threadgroup.x;
out[first + place] = x[thread_position_in_grid.x];
