// The rows that a wrapped step reads, in logical order: the newest old rows out of the ring, then
// the new rows.
//
// Inputs   ring        [B, H, R, D]  T, any strides
//          rows        [B, H, T, D]  T, any strides
//          first_slot  int32 scalar: the slot of the first old row
// Output   out         [B, H, N + T, D]  T; N <= R old rows, known from the grid
// Template T the dtype, PACK the elements that one thread moves (divides D)
// Grid     (D / PACK, N + T, B * H): one thread for each pack of the output
// Bytes    reads and writes N + T rows for each slab

const uint column = thread_position_in_grid.x * PACK;
const uint index = thread_position_in_grid.y;
const uint slab = thread_position_in_grid.z;
const uint total = threads_per_grid.y;
const uint old_rows = total - rows_shape[2];
const uint slots = ring_shape[2];
const uint dim = ring_shape[3];

Pack<T, PACK> pack;
if (index < old_rows) {
  const uint slot = (ring_slot(first_slot, slots) + index) % slots;
  const int64_t from = element_offset(ring_shape, ring_strides, slab, slot, column);
  pack = load_pack<T, PACK>(ring + from, ring_strides[3]);
} else {
  const int64_t from = element_offset(rows_shape, rows_strides, slab, index - old_rows, column);
  pack = load_pack<T, PACK>(rows + from, rows_strides[3]);
}
const int64_t to = (int64_t(slab) * total + index) * dim + column;
store_pack<T, PACK>(out + to, pack);
