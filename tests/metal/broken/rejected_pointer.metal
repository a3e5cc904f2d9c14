// A pointer that does not say where it points to.
const uint i = thread_position_in_grid.x;
float lanes[2] = {x[i], x[i]};
float* lane = lanes; // expect: rejected
out[i] = lane[1];
