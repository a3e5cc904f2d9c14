// Fills the tile anew while other threads may still read the old one.
threadgroup float tile[64];
const uint i = thread_position_in_threadgroup.x;
float sum = 0.0f;
for (int round = 0; round < 2; ++round) {
  tile[i] = x[thread_position_in_grid.x] + float(round); // expect: race
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum += tile[63 - i]; // expect: race
}
out[thread_position_in_grid.x] = sum;
