// A thread writes its element twice.
const uint i = thread_position_in_grid.x;
out[i] = 0.0f;
out[i] = x[i]; // expect: written-twice
