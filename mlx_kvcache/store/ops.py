"""The MLX-ops path of `kernels`: the same writes and gathers, without a kernel of our own.

Arguments are as in `kernels`, already checked.
"""

from __future__ import annotations

import mlx.core as mx

#: (slot, row, count): `count` rows from `row` on, at `count` slots from `slot` on.
Piece = tuple[int, int, int]
Slot = int | mx.array

#: Rows lie on axis 2 of [B, H, rows, D].
ROW_AXIS = (2,)


def write_rows(pool: mx.array, rows: mx.array, start: int | mx.array) -> mx.array:
    """`pool` [B, H, N, D] with `rows` [B, H, T, D] at row `start`, cast to the pool's dtype.

    The caller guarantees that the rows fit: MLX does not check an array start.
    """
    if isinstance(start, mx.array):
        return mx.slice_update(pool, rows, start, ROW_AXIS)
    # A new handle to the same buffer: item assignment rebinds the handle it is called on, and
    # whoever was given the old one must not see it change.
    written = pool[:]
    written[:, :, start : start + rows.shape[2]] = rows
    return written


def ring_write(ring: mx.array, rows: mx.array, start_slot: Slot) -> mx.array:
    """`ring_write` by MLX ops: one slice update for each contiguous run, in place if it may."""
    steps, slots = rows.shape[2], ring.shape[2]
    if isinstance(start_slot, mx.array):
        if steps > slots:
            start_slot = start_slot + (steps - slots)
            rows = rows[:, :, steps - slots :]
        if rows.shape[2] == 1:
            start = (start_slot.reshape((1,)) % slots).astype(mx.int32)
            return mx.slice_update(ring, rows, start, axes=(2,))
        return cell_scatter(ring, rows, _wrapped(start_slot, rows.shape[2], slots))
    for slot, row, count in write_pieces(start_slot, steps, slots):
        piece = rows if count == steps else rows[:, :, row : row + count]
        ring = place(ring, piece, slot)
    return ring


def place(ring: mx.array, piece: mx.array, slot: int) -> mx.array:
    """One contiguous run, in the form that costs less on the current device.

    On a CPU an array start builds fastest; on a GPU it would take a dispatch of its own.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return write_rows(ring, piece, slot if on_gpu else mx.array([slot], mx.int32))


def ring_join(ring: mx.array, rows: mx.array, first_slot: Slot, old_count: int) -> mx.array:
    """`ring_join` by MLX ops: a concatenation of the ring's one or two runs and the new rows."""
    slots = ring.shape[2]
    if isinstance(first_slot, mx.array):
        old = mx.take(ring, _wrapped(first_slot, old_count, slots), axis=2)
        return mx.concatenate([old, rows], axis=2)
    parts = [
        ring[:, :, slot : slot + count] for slot, _, count in pieces(first_slot, old_count, slots)
    ]
    return mx.concatenate([*parts, rows], axis=2)


def ring_write_quantized(
    words: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    start_slot: Slot,
    *,
    group_size: int,
    bits: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """`ring_write_quantized` by MLX ops: `mx.quantize`, then three ring writes."""
    over = rows.shape[2] - words.shape[2]
    if over > 0:
        rows = rows[:, :, over:]
        start_slot = (start_slot + over) % words.shape[2]
    new_words, new_scales, new_biases = mx.quantize(rows, group_size=group_size, bits=bits)
    return (
        ring_write(words, new_words, start_slot),
        ring_write(scales, new_scales, start_slot),
        ring_write(biases, new_biases, start_slot),
    )


def cell_scatter(pool: mx.array, rows: mx.array, cells: mx.array) -> mx.array:
    """`cell_scatter` by MLX ops; which of two rows for one cell stays is not defined."""
    return mx.put_along_axis(pool, cells[None, None, :, None], rows, axis=2)


def cell_gather(pool: mx.array, cells: mx.array, rows: int = 0) -> mx.array:
    """`cell_gather` by MLX ops."""
    return with_rows(mx.take(pool, cells, axis=2), rows)


def with_rows(array: mx.array, rows: int) -> mx.array:
    """`array` [B, H, N, D] with rows of zeros behind its own, up to `rows` of them."""
    batch, heads, held, dim = array.shape
    if rows <= held:
        return array
    # Joined with one number stretched over the new rows: zeros of their own would be written twice.
    more = mx.broadcast_to(mx.array(0, array.dtype), (batch, heads, rows - held, dim))
    return mx.concatenate([array, more], axis=2)


def pieces(start: int, count: int, slots: int) -> tuple[Piece, ...]:
    """The runs of `count` <= `slots` rows from slot `start` on: one, or two where they wrap."""
    if count == 0:
        return ()
    head = min(count, slots - start)
    if head == count:
        return ((start, 0, count),)
    return ((start, 0, head), (0, head, count - head))


def write_pieces(start: int, steps: int, slots: int) -> tuple[Piece, ...]:
    """The runs of a write of `steps` rows: of more than `slots` only the newest are written."""
    skipped = max(0, steps - slots)
    kept = pieces((start + skipped) % slots, steps - skipped, slots)
    return tuple((slot, row + skipped, count) for slot, row, count in kept)


def _wrapped(start: mx.array, count: int, slots: int) -> mx.array:
    return (start.reshape(()).astype(mx.int32) + mx.arange(count, dtype=mx.int32)) % slots
