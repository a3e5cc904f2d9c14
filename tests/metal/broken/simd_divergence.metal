// The lanes of one simdgroup take part in different sums.
const uint i = thread_position_in_grid.x;
float sum = 0.0f;
if (i % 2 == 0) {
  sum = simd_sum(x[i]); // expect: simd-divergence
} else {
  sum = simd_sum(-x[i]); // expect: simd-divergence
}
out[i] = sum;
