// The product has 64 bits, the sum is kept in 32.
const uint i = thread_position_in_grid.x;
const int at = int(int64_t(i % 8) * far_strides[0] + 0);
out[i] = far[at]; // expect: out-of-range
