// float4 loads two elements apart: every other one does not begin at 16 bytes.
const uint i = thread_position_in_grid.x;
const uint even = i % 32 * 4;
const uint odd = i % 31 * 4 + 2;
out[i] = ((const device float4*)(x + even))[0].x;
if (((const device float4*)(x + odd))[0].x < 0.0f) { // expect: misaligned
  return;
}
