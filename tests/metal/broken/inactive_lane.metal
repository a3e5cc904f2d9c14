// Shuffles out of lanes that have returned.
const uint i = thread_position_in_grid.x;
const uint lane = thread_index_in_simdgroup;
out[i] = x[i] * 2.0f;
if (lane >= 16) {
  return;
}
const float other = simd_shuffle_xor(x[i], 16); // expect: inactive-lane
if (other > 1000.0f) {
  return;
}
