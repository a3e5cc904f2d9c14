// New rows of K or V into a ring, wrapping.
//
// Inputs   ring        [B, H, R, D]  T, any strides
//          rows        [B, H, T, D]  T, any strides; any number of rows, of which the newest R stay
//          start_slot  int32 scalar: where row 0 goes (position mod R)
// Output   out         [B, H, R, D]  T
// Template T the dtype, PACK the elements that one thread moves (divides D)
// Grid     (D / PACK, R, B * H): one thread for each pack of the output
// Bytes    reads R rows, of which min(T, R) are new ones, and writes R rows, for each slab

const uint column = thread_position_in_grid.x * PACK;
const uint slot = thread_position_in_grid.y;
const uint slab = thread_position_in_grid.z;
const uint slots = ring_shape[2];
const uint dim = ring_shape[3];

const int row = newest_row(slot, ring_slot(start_slot, slots), rows_shape[2], slots);
Pack<T, PACK> pack;
if (row >= 0) {
  const int64_t from = element_offset(rows_shape, rows_strides, slab, row, column);
  pack = load_pack<T, PACK>(rows + from, rows_strides[3]);
} else {
  const int64_t from = element_offset(ring_shape, ring_strides, slab, slot, column);
  pack = load_pack<T, PACK>(ring + from, ring_strides[3]);
}
const int64_t to = (int64_t(slab) * slots + slot) * dim + column;
store_pack<T, PACK>(out + to, pack);
