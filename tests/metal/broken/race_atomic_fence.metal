// The barrier does not order threadgroup memory, atomic or not.
threadgroup atomic_int most;
if (thread_index_in_threadgroup == 0) {
  atomic_store_explicit(&most, 0, memory_order_relaxed); // expect: race
}
threadgroup_barrier(mem_flags::mem_device);
atomic_fetch_max_explicit(&most, int(x[thread_position_in_grid.x]), memory_order_relaxed); // expect: race
threadgroup_barrier(mem_flags::mem_threadgroup);
out[thread_position_in_grid.x] = float(atomic_load_explicit(&most, memory_order_relaxed));
