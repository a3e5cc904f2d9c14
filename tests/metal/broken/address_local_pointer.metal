// The same through a pointer, which hides the array's size.
const uint i = thread_position_in_grid.x;
float lanes[4] = {0.0f, 1.0f, 2.0f, 3.0f};
thread float* lane = lanes;
lane += i % 7;
out[i] = lane[0]; // expect: address undefined
