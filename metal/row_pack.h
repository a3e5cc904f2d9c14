// What the kernels of this folder share: where a row starts, and how a piece of it is moved.
//
// Arrays are [B, H, rows, D]. A slab is one of the B * H blocks of rows; slab = b * H + h.
// MLX passes an array of fewer than 8 elements in `constant` memory and any other one in
// `device` memory, so whatever takes a pointer to an input exists for both.

// N neighboring elements of a row. It has the alignment of one element, because a view may start
// at any element of its buffer.
template <typename T, int N>
struct Pack {
  T lane[N];
};

// N elements that lie `step` apart: one wide load where they are neighbors.
template <typename T, int N>
inline Pack<T, N> load_pack(const device T* source, int64_t step) {
  if (N > 1 && step == 1) {
    return *(const device Pack<T, N>*)source;
  }
  Pack<T, N> pack;
  for (int i = 0; i < N; ++i) {
    pack.lane[i] = source[i * step];
  }
  return pack;
}

template <typename T, int N>
inline Pack<T, N> load_pack(const constant T* source, int64_t step) {
  Pack<T, N> pack;
  for (int i = 0; i < N; ++i) {
    pack.lane[i] = source[i * step];
  }
  return pack;
}

// Outputs are contiguous: MLX allocates them.
template <typename T, int N>
inline void store_pack(device T* target, Pack<T, N> pack) {
  *(device Pack<T, N>*)target = pack;
}

// Offset, in elements, of element `column` of a row of a strided input.
inline int64_t element_offset(
    const constant int* shape,
    const constant int64_t* strides,
    uint slab,
    uint row,
    uint column) {
  const uint heads = shape[1];
  return int64_t(slab / heads) * strides[0] + int64_t(slab % heads) * strides[1] +
      int64_t(row) * strides[2] + int64_t(column) * strides[3];
}

// The slot of a ring that a position falls on. Any integer is accepted, so that a bad start can
// only misplace rows, never leave the array.
inline uint ring_slot(int position, uint slots) {
  const int slot = position % int(slots);
  return slot < 0 ? uint(slot + int(slots)) : uint(slot);
}

// The newest of `count` rows written from slot `start` on that lands on `slot`, or -1.
inline int newest_row(uint slot, uint start, uint count, uint slots) {
  const uint ahead = slot >= start ? slot - start : slot + (slots - start);
  return ahead < count ? int(ahead + (count - 1 - ahead) / slots * slots) : -1;
}
