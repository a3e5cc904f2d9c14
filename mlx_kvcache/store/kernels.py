"""A write or a gather of cache rows, by a Metal kernel or by plain MLX ops.

Arrays are [B, H, rows, D]. A ring of R slots holds position p at slot p mod R. Every function
returns a new array and leaves its inputs as they were; MLX writes in place when the caller keeps
no reference to the old array (`ring = ring_write(ring, rows, slot)`).

On a Metal GPU the path that moves fewer bytes is taken (`choice.cheaper_path`), MLX's ops where
there is little to move; on a CPU, also the CPU of a Mac, always the ops. The environment variable
MLX_KVCACHE_KERNELS (auto, metal, ops) forces one. Both paths give the same bits on the same device.

A start may be an integer, or an integer `mx.array` scalar where a compiled step must not be
retraced for each value; an array is not checked against the ring but taken modulo its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from mlx_kvcache.errors import (
    KernelUnavailableError,
    PositionError,
    UpdateDtypeError,
    UpdateShapeError,
)
from mlx_kvcache.store import choice, metal, ops

Slot = ops.Slot

QUANTIZED_GROUPS = (32, 64, 128)
QUANTIZED_BITS = (4, 8)


def ring_write(
    ring: mx.array, rows: mx.array, start_slot: Slot, *, shared: bool = False
) -> mx.array:
    """The ring after `rows` were written from `start_slot` on, wrapping.

    ring [B, H, R, D], rows [B, H, T, D] of the same dtype; of more than R rows the newest R stay.
    shared: whether something else holds `ring` (a fork, a checkpoint), so that MLX would have to
    copy it before a write; a fact for the choice of the path, without effect on the result.
    Raises `UpdateShapeError`, `UpdateDtypeError`, and `PositionError` for a slot outside the ring.
    """
    _require_rows("ring", ring, rows)
    _require_slot("start_slot", start_slot, ring.shape[2])
    if _nothing_to_write(ring, rows):
        return ring
    costs = choice.ring_write_costs(
        rows.shape[2],
        ring.shape[2],
        _row_bytes(rows),
        runs=_run_count(start_slot, rows.shape[2], ring.shape[2]),
        shared=shared,
    )
    if _path(costs) == "metal":
        return metal.run(metal.ring_write(ring, rows, start_slot))[0]
    return ops.ring_write(ring, rows, start_slot)


def ring_join(ring: mx.array, rows: mx.array, first_slot: Slot, old_count: int) -> mx.array:
    """`old_count` rows of the ring from `first_slot` on, wrapping, then `rows`.

    ring [B, H, R, D], rows [B, H, T, D] of the same dtype; returns [B, H, old_count + T, D].
    Raises `UpdateShapeError`, `UpdateDtypeError`, and `PositionError` when `first_slot` lies
    outside the ring or `old_count` is negative or more than R.
    """
    _require_rows("ring", ring, rows)
    slots = ring.shape[2]
    _require_slot("first_slot", first_slot, slots)
    if not 0 <= old_count <= slots:
        raise PositionError(f"old_count must be between 0 and the ring's {slots}, got {old_count}")
    if old_count == 0:
        return rows
    if ring.size == 0 or rows.size == 0:
        return ops.ring_join(ring, rows, first_slot, old_count)
    costs = choice.ring_join_costs(
        old_count,
        rows.shape[2],
        _row_bytes(rows),
        runs=_run_count(first_slot, old_count, slots),
    )
    if _path(costs) == "metal":
        return metal.run(metal.ring_join(ring, rows, first_slot, old_count))[0]
    return ops.ring_join(ring, rows, first_slot, old_count)


def ring_write_quantized(
    words: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    start_slot: Slot,
    *,
    shared: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """The quantized ring after `rows` were quantized and written from `start_slot` on, wrapping.

    words [B, H, R, D * bits / 32] uint32, scales and biases [B, H, R, D / group] in the dtype of
    rows [B, H, T, D]; group size (32, 64, 128) and bits (4, 8) follow from the shapes. The new
    slots hold what `mx.quantize` (affine) gives on the same device, bit for bit, for finite rows.
    Raises as `ring_write` does.
    """
    group_size, bits = _require_quantized(words, scales, biases, rows)
    slots, steps = words.shape[2], rows.shape[2]
    _require_slot("start_slot", start_slot, slots)
    if _nothing_to_write(words, rows):
        return words, scales, biases
    costs = choice.ring_write_quantized_costs(
        steps,
        slots,
        _row_bytes(rows),
        _row_bytes(words) + _row_bytes(scales) + _row_bytes(biases),
        runs=_run_count(start_slot, steps, slots),
        shared=shared,
    )
    if _path(costs) == "metal":
        outputs = metal.run(metal.ring_write_quantized(words, scales, biases, rows, start_slot))
        return outputs[0], outputs[1], outputs[2]
    return ops.ring_write_quantized(
        words, scales, biases, rows, start_slot, group_size=group_size, bits=bits
    )


def cell_scatter(
    pool: mx.array, rows: mx.array, cells: Sequence[int] | mx.array, *, shared: bool = False
) -> mx.array:
    """The pool after row i of `rows` was written to cell `cells[i]`.

    pool [B, H, C, D], rows [B, H, T, D] of the same dtype, cells T distinct integers in [0, C).
    An integer `mx.array` of cells is not checked. Raises `UpdateShapeError`, `UpdateDtypeError`,
    and `PositionError` for a cell outside the pool or named twice.
    """
    _require_rows("pool", pool, rows)
    indices = _cell_array(cells, pool.shape[2], distinct=True)
    if indices.size != rows.shape[2]:
        raise UpdateShapeError(f"{rows.shape[2]} rows need as many cells, got {indices.size}")
    if _nothing_to_write(pool, rows):
        return pool
    costs = choice.cell_scatter_costs(rows.shape[2], pool.shape[2], _row_bytes(rows), shared=shared)
    if _path(costs) == "metal":
        return metal.run(metal.cell_scatter(pool, rows, indices))[0]
    return ops.cell_scatter(pool, rows, indices)


def cell_gather(pool: mx.array, cells: Sequence[int] | mx.array, rows: int = 0) -> mx.array:
    """The rows of `cells`, in their order: [B, H, S, D] out of pool [B, H, C, D].

    With `rows` more than S, rows of zeros follow: [B, H, rows, D]. An integer `mx.array` of cells
    is not checked. Raises `PositionError` for a cell outside.
    """
    _require_four_axes("pool", pool)
    indices = _cell_array(cells, pool.shape[2], distinct=False)
    rows = max(indices.size, rows)
    if indices.size == 0 or pool.size == 0:
        return ops.cell_gather(pool, indices, rows)
    if _path(choice.cell_gather_costs(indices.size, rows, _row_bytes(pool))) == "metal":
        return metal.run(metal.cell_gather(pool, indices, rows))[0]
    return ops.cell_gather(pool, indices, rows)


def metal_is_current() -> bool:
    """Whether new work would run on a Metal GPU: the default device is one."""
    return _has_metal() and mx.default_device().type == mx.DeviceType.gpu


@lru_cache(maxsize=1)
def _has_metal() -> bool:
    return bool(mx.metal.is_available())


def _path(costs: choice.PathCosts) -> choice.KernelPath:
    forced = choice.forced_path()
    if forced == "metal" and not metal_is_current():
        raise KernelUnavailableError(
            f"{choice.PATH_VARIABLE}=metal asks for the Metal kernels, but "
            + (
                f"the default device is {mx.default_device()}; make the GPU the default device"
                if _has_metal()
                else "this MLX has no Metal; run on Apple silicon, or set it to auto or ops"
            )
        )
    if forced is not None:
        return forced
    return choice.cheaper_path(costs) if metal_is_current() else "ops"


def _run_count(start: Slot, count: int, slots: int) -> int:
    """Contiguous runs of a write or read; an array start goes as one gather or scatter."""
    if isinstance(start, mx.array):
        return 1
    return len(ops.write_pieces(start, count, slots))


def _row_bytes(array: mx.array) -> int:
    batch, heads, _, dim = array.shape
    return int(batch * heads * dim * array.dtype.size)


def _nothing_to_write(target: mx.array, rows: mx.array) -> bool:
    return rows.size == 0 or target.size == 0


def _require_four_axes(name: str, array: mx.array) -> None:
    if array.ndim != 4:
        raise UpdateShapeError(f"{name} must be [B, H, rows, D], got shape {array.shape}")


def _require_rows(name: str, target: mx.array, rows: mx.array) -> None:
    _require_four_axes(name, target)
    _require_four_axes("rows", rows)
    same = (0, 1, 3)
    if any(target.shape[axis] != rows.shape[axis] for axis in same):
        raise UpdateShapeError(
            f"rows of shape {rows.shape} do not fit a {name} of shape {target.shape}: "
            "batch, heads and head dim must agree"
        )
    if rows.dtype != target.dtype:
        raise UpdateDtypeError(
            f"rows are {rows.dtype} but the {name} is {target.dtype}; cast the rows first"
        )


def _require_slot(name: str, slot: Slot, slots: int) -> None:
    if isinstance(slot, mx.array):
        if slot.size != 1 or not mx.issubdtype(slot.dtype, mx.integer):
            raise PositionError(f"{name} must be one integer, got {slot.dtype} {slot.shape}")
    elif isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < max(slots, 1):
        raise PositionError(f"{name} must be a slot of the ring of {slots}, got {slot!r}")


def _require_quantized(
    words: mx.array, scales: mx.array, biases: mx.array, rows: mx.array
) -> tuple[int, int]:
    """Group size and bits of a quantized ring, from its shapes."""
    for name, array in (("words", words), ("scales", scales), ("biases", biases), ("rows", rows)):
        _require_four_axes(name, array)
    if words.dtype != mx.uint32:
        raise UpdateDtypeError(f"words must be uint32, got {words.dtype}")
    if not scales.dtype == biases.dtype == rows.dtype:
        raise UpdateDtypeError(
            f"scales ({scales.dtype}) and biases ({biases.dtype}) must have the dtype of the "
            f"rows ({rows.dtype}); cast the rows first"
        )
    if not mx.issubdtype(rows.dtype, mx.floating):
        raise UpdateDtypeError(f"rows must be floating point to be quantized, got {rows.dtype}")
    dim = rows.shape[3]
    group_size = dim // max(scales.shape[3], 1)
    bits = words.shape[3] * 32 // max(dim, 1)
    lead = words.shape[:3]
    fits = (
        words.shape[:2] == rows.shape[:2]
        and scales.shape == (*lead, dim // group_size if group_size else 0)
        and biases.shape == scales.shape
        and words.shape[3] == dim * bits // 32
        and group_size in QUANTIZED_GROUPS
        and dim % group_size == 0
        and bits in QUANTIZED_BITS
    )
    if not fits:
        raise UpdateShapeError(
            f"words {words.shape}, scales {scales.shape} and biases {biases.shape} are no "
            f"quantized ring for rows of shape {rows.shape}; the group size must be one of "
            f"{QUANTIZED_GROUPS} and the bits one of {QUANTIZED_BITS}"
        )
    return group_size, bits


def _cell_array(cells: Sequence[int] | mx.array, pool_cells: int, *, distinct: bool) -> mx.array:
    if isinstance(cells, mx.array):
        if cells.ndim != 1 or not mx.issubdtype(cells.dtype, mx.integer):
            raise PositionError(
                f"cells must be a list of integers, got {cells.dtype} {cells.shape}"
            )
        return cells
    outside = [cell for cell in cells if not 0 <= cell < pool_cells]
    if outside:
        raise PositionError(f"cells {outside} are outside the pool of {pool_cells}")
    if distinct and len(set(cells)) != len(cells):
        raise PositionError(f"cells {list(cells)} name one cell more than once")
    return mx.array(list(cells), mx.int32)
