// A simdgroup waits for its own lanes only.
threadgroup atomic_int count;
if (thread_index_in_threadgroup == 0) {
  atomic_store_explicit(&count, 0, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
atomic_fetch_add_explicit(&count, 1, memory_order_relaxed); // expect: race
simdgroup_barrier(mem_flags::mem_threadgroup);
out[thread_position_in_grid.x] = float(atomic_load_explicit(&count, memory_order_relaxed)); // expect: race
