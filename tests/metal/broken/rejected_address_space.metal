// A tiny input comes in constant memory, and is no device pointer.
const uint i = thread_position_in_grid.x;
const device float* start = tiny; // expect: rejected
out[i] = start[i % 3];
