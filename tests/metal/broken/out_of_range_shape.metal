// Asks for an axis that the input does not have.
const uint i = thread_position_in_grid.x;
out[i] = x[i] + float(x_shape[1]); // expect: out-of-range
