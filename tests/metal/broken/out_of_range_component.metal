// A vector has four components.
const uint i = thread_position_in_grid.x;
const float4 four = float4(x[i]);
out[i] = four[i % 5]; // expect: out-of-range
