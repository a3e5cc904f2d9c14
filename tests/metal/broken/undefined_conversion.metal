// A float that no unsigned integer holds.
const uint i = thread_position_in_grid.x;
const uint level = uint(x[i] - 1000.0f); // expect: undefined
out[i] = float(level);
