// Every other half4 of a row of two-byte numbers begins at 4 modulo 8.
threadgroup half tile[512];
const uint i = thread_position_in_threadgroup.x;
for (uint k = i; k < 512; k += 64) {
  tile[k] = half(float(k));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const half4 four = ((threadgroup half4*)(tile + 2 * i))[0]; // expect: misaligned
out[thread_position_in_grid.x] = float(four.x);
