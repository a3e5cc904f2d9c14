// Two threads write the same element, if with the same value.
const uint i = thread_position_in_grid.x;
out[i] = 1.0f; // expect: written-twice
if (i > 0) {
  out[i - 1] = 1.0f; // expect: written-twice
}
