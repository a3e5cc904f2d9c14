// Rows to arbitrary cells of a pool.
//
// Inputs   pool   [B, H, C, D]  T, any strides
//          rows   [B, H, T, D]  T, any strides
//          cells  [T]           int32, any stride: the cell of each row; of rows that name the
//                               same cell the last one stays, a cell outside the pool is skipped
// Output   out    [B, H, C, D]  T
// Template T the dtype, PACK the elements that one thread moves (divides D)
// Grid     (D / PACK, C, B * H): one thread for each pack of the output
// Group    at most TILE threads in y, 1 in z
// Bytes    reads C rows, of which T are new ones, and writes C rows, for each slab; each
//          threadgroup also reads all of `cells`
//
// A threadgroup first works out together which row lands on each of its cells, then copies.

constexpr uint TILE = 256;
threadgroup atomic_int landing[TILE];

const uint column = thread_position_in_grid.x * PACK;
const uint cell = thread_position_in_grid.y;
const uint slab = thread_position_in_grid.z;
const uint place = thread_position_in_threadgroup.y;
const uint first_cell = cell - place;
const uint tile = threads_per_threadgroup.y;
const uint threads = threads_per_threadgroup.x * tile;
const uint pool_cells = pool_shape[2];
const uint dim = pool_shape[3];

for (uint i = thread_index_in_threadgroup; i < tile; i += threads) {
  atomic_store_explicit(&landing[i], -1, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = thread_index_in_threadgroup; i < uint(rows_shape[2]); i += threads) {
  // A cell before this tile, or a negative one, becomes a large number here.
  const uint offset = uint(cells[i * cells_strides[0]]) - first_cell;
  if (offset < tile) {
    atomic_fetch_max_explicit(&landing[offset], int(i), memory_order_relaxed);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int row = atomic_load_explicit(&landing[place], memory_order_relaxed);

Pack<T, PACK> pack;
if (row >= 0) {
  const int64_t from = element_offset(rows_shape, rows_strides, slab, row, column);
  pack = load_pack<T, PACK>(rows + from, rows_strides[3]);
} else {
  const int64_t from = element_offset(pool_shape, pool_strides, slab, cell, column);
  pack = load_pack<T, PACK>(pool + from, pool_strides[3]);
}
const int64_t to = (int64_t(slab) * pool_cells + cell) * dim + column;
store_pack<T, PACK>(out + to, pack);
