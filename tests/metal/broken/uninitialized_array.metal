// expect: uninitialized-read
// A sum of one element too many.
const uint i = thread_position_in_grid.x;
float lanes[4], sum = 0.0f;
for (int lane = 0; lane < 3; ++lane) {
  lanes[lane] = x[i];
}
for (int lane = 0; lane < 4; ++lane) {
  sum += lanes[lane];
}
out[i] = sum;
