// A string literal.
const uint i = thread_position_in_grid.x;
out[i] = x[i] + float(sizeof("name")); // expect: rejected
