// A cast takes the const away; the input is still the caller's.
const uint i = thread_position_in_grid.x;
out[i] = x[i];
((device float*)x)[i] = 0.0f; // expect: input-written
