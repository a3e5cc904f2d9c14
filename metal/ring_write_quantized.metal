// New rows of K or V, quantized on the way (affine), into a quantized ring, wrapping.
//
// Inputs   words       [B, H, R, D * BITS / 32]  uint32, any strides
//          scales      [B, H, R, D / GROUP]      T, any strides
//          biases      [B, H, R, D / GROUP]      T, any strides
//          rows        [B, H, T, D]              T, any strides, finite; the newest R of them stay
//          start_slot  int32 scalar: where row 0 goes (position mod R)
// Outputs  words_out, scales_out, biases_out: as the inputs of that name
// Template T the dtype; GROUP 32, 64 or 128; BITS 4 or 8; CPU_RULE which of MLX's two rules
// Grid     (D * BITS / 32, R, B * H): one thread for each word of the output
// Group    x a multiple of 32 or all of the grid's x, so that the threads of a quantization group
//          are neighbors within one simdgroup
// Bytes    reads R - T old rows (packed) and T new ones (full), writes R rows (packed), for each slab
//
// mx.quantize does not round alike on its two devices: on the CPU half to even, over the group's
// true maximum; on the GPU half away from zero, over a maximum of at least 0. CPU_RULE picks one,
// so that the result is bit-identical to mx.quantize's on that device. All else is the same: the
// end of the range that is farther from zero becomes an exact multiple of the scale.

constexpr int PER_WORD = 32 / BITS;
constexpr int LANES = GROUP / PER_WORD;
constexpr float TOP = (1 << BITS) - 1;

const uint word = thread_position_in_grid.x;
const uint slot = thread_position_in_grid.y;
const uint slab = thread_position_in_grid.z;
const uint slots = words_shape[2];
const uint group = word / LANES;
const bool leads_group = word % LANES == 0;
const int64_t out_row = int64_t(slab) * slots + slot;
const int64_t word_to = out_row * words_shape[3] + word;
const int64_t group_to = out_row * scales_shape[3] + group;

const int row = newest_row(slot, ring_slot(start_slot, slots), rows_shape[2], slots);
Pack<T, PER_WORD> values;
float low = INFINITY;
float high = CPU_RULE ? -INFINITY : 0.0f;
if (row >= 0) {
  const int64_t from = element_offset(rows_shape, rows_strides, slab, row, word * PER_WORD);
  values = load_pack<T, PER_WORD>(rows + from, rows_strides[3]);
  for (int i = 0; i < PER_WORD; ++i) {
    low = min(low, float(values.lane[i]));
    high = max(high, float(values.lane[i]));
  }
}
// Every thread takes part, also those of rows that stay: a shuffle must not meet an idle lane.
for (ushort distance = 1; distance < LANES; distance *= 2) {
  low = min(low, simd_shuffle_xor(low, distance));
  high = max(high, simd_shuffle_xor(high, distance));
}

if (row < 0) {
  words_out[word_to] = words[element_offset(words_shape, words_strides, slab, slot, word)];
  if (leads_group) {
    scales_out[group_to] = scales[element_offset(scales_shape, scales_strides, slab, slot, group)];
    biases_out[group_to] = biases[element_offset(biases_shape, biases_strides, slab, slot, group)];
  }
  return;
}

const bool low_is_edge = abs(low) > abs(high);
const float edge = low_is_edge ? low : high;
const float step = max((high - low) / TOP, 1e-7f);
float scale = low_is_edge ? step : -step;
const float ratio = edge / scale;
const float edge_steps = CPU_RULE ? rint(ratio) : round(ratio);
float bias = 0.0f;
if (edge_steps != 0.0f) {
  scale = edge / edge_steps;
  bias = edge;
}

uint packed = 0;
for (int i = 0; i < PER_WORD; ++i) {
  const float steps = (float(values.lane[i]) - bias) / scale;
  const float level = CPU_RULE ? rint(steps) : round(steps);
  packed |= uint(min(max(level, 0.0f), TOP)) << (BITS * i);
}
words_out[word_to] = packed;
if (leads_group) {
  scales_out[group_to] = static_cast<T>(scale);
  biases_out[group_to] = static_cast<T>(bias);
}
