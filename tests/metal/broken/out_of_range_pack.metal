// A pack that reaches over the end of the last row.
const uint i = thread_position_in_grid.x;
const Pack<float, 4> pack = ((const device Pack<float, 4>*)(x + i))[0]; // expect: out-of-range
out[i] = pack.lane[0];
