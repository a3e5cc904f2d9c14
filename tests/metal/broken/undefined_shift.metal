// A shift by the whole width.
const uint i = thread_position_in_grid.x;
const uint shifted = 1u << (i % 33); // expect: undefined
out[i] = float(shifted);
