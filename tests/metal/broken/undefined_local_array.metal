// An index past a local array.
const uint i = thread_position_in_grid.x;
float lanes[4] = {0.0f, 1.0f, 2.0f, 3.0f};
out[i] = lanes[i % 5]; // expect: undefined address
