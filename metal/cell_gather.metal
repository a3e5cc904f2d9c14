// Rows from arbitrary cells of a pool, with rows of zeros behind them.
//
// Inputs   pool   [B, H, C, D]  T, any strides
//          cells  [S]           int32, any stride: the cell of each row, in [0, C); a cell
//                               outside is read as the nearest one inside
// Output   out    [B, H, A, D]  T; A >= S rows, known from the grid
// Template T the dtype, PACK the elements that one thread moves (divides D)
// Grid     (D / PACK, A, B * H): one thread for each pack of the output
// Bytes    reads S rows and writes A rows for each slab

const uint column = thread_position_in_grid.x * PACK;
const uint row = thread_position_in_grid.y;
const uint slab = thread_position_in_grid.z;
const uint count = threads_per_grid.y;
const uint dim = pool_shape[3];

Pack<T, PACK> pack;
if (row < uint(cells_shape[0])) {
  const int cell = clamp(int(cells[row * cells_strides[0]]), 0, pool_shape[2] - 1);
  const int64_t from = element_offset(pool_shape, pool_strides, slab, cell, column);
  pack = load_pack<T, PACK>(pool + from, pool_strides[3]);
} else {
  for (int i = 0; i < PACK; ++i) {
    pack.lane[i] = static_cast<T>(0.0f);
  }
}
const int64_t to = (int64_t(slab) * count + row) * dim + column;
store_pack<T, PACK>(out + to, pack);
