// A local that outlives its call.
const uint i = thread_position_in_grid.x;
static int calls = 0; // expect: rejected
calls += 1;
out[i] = x[i];
