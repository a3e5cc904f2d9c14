// An int and an unsigned one.
const uint i = thread_position_in_grid.x;
const uint near = clamp(i, 0, 127); // expect: rejected
out[i] = x[near];
