// One threadgroup reads what another one writes: no barrier can order them.
const uint i = thread_position_in_grid.x;
out[i] = x[i]; // expect: race
threadgroup_barrier(mem_flags::mem_device);
if (i >= 64 && out[i - 64] > 100.0f) { // expect: race uninitialized-read
  return;
}
