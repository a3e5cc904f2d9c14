// A reference needs an address space as well.
const uint i = thread_position_in_grid.x;
float sum = x[i];
float& same = sum; // expect: rejected
out[i] = same;
