// expect: uninitialized-read
// A component that is never set.
const uint i = thread_position_in_grid.x;
float4 four;
four.xyz = float3(x[i]);
out[i] = four.x + four.w;
