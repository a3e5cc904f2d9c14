// The barrier orders the threads but not their threadgroup memory.
threadgroup float tile[64];
const uint i = thread_position_in_threadgroup.x;
tile[i] = x[thread_position_in_grid.x];
threadgroup_barrier(mem_flags::mem_device);
out[thread_position_in_grid.x] = tile[63 - i]; // expect: race
