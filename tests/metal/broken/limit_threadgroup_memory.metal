// 40 KiB in two arrays; a threadgroup has 32.
threadgroup float tile[64 * 64];
threadgroup float other[64][96]; // expect: limit
const uint i = thread_position_in_grid.x;
tile[thread_position_in_threadgroup.x] = x[i];
out[i] = x[i];
