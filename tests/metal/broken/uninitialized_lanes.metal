// expect: uninitialized-read
// Only half of a pack is filled.
const uint i = thread_position_in_grid.x;
Pack<float, 4> pack;
pack.lane[0] = x[i];
pack.lane[1] = x[i];
out[i] = pack.lane[i % 4];
