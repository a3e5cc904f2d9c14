// float4 loads at any element: they need 16 bytes.
const uint i = thread_position_in_grid.x;
const uint from = i < 60 ? i : 60;
const float4 four = ((const device float4*)(x + from))[0]; // expect: misaligned
out[i] = four.x;
