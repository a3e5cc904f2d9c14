// Metal does not narrow a float to a bfloat by itself.
const uint i = thread_position_in_grid.x;
bfloat16_t small = x[i] * 2.0f; // expect: rejected
out[i] = float(small);
