// An index that wraps at 32 bits: the elements lie further apart than that.
const uint i = thread_position_in_grid.x;
const uint at = (i % 8) * uint(far_strides[0]);
out[i] = far[at]; // expect: out-of-range
