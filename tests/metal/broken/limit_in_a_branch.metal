// The memory is taken whether or not the branch is.
const uint i = thread_position_in_grid.x;
if (x[i] < 0.0f) {
  threadgroup half tile[32 * 1024]; // expect: limit
  tile[i] = half(0.0f);
}
out[i] = x[i];
