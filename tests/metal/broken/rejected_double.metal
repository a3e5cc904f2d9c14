// Metal has no double.
const uint i = thread_position_in_grid.x;
const double wide = x[i]; // expect: rejected
out[i] = float(wide);
