// Inputs are const.
const uint i = thread_position_in_grid.x;
x[i] = 0.0f; // expect: rejected
out[i] = x[i];
