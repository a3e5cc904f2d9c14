// Metal's max takes two numbers of one type; a half and a float fit two of them equally well.
const uint i = thread_position_in_grid.x;
const half small = half(x[i]);
out[i] = max(small, 2.0f); // expect: rejected
