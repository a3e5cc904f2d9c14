"""Launches whose offsets need more than 32 bits, of which little memory and few threads are used.

Two kinds for each kernel. In one the elements of every input lie far apart along every axis. In
the other an output has far more than 2 ** 32 elements, of which a single threadgroup writes the
last ones, or the first ones of the last slab; the inputs as large as it repeat one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_kvcache.store import metal, ops
from mlx_kvcache.store.metal import Launch
from tests.support.kernel_arrays import random_array

from .host.executor import Part

FAR = 2**32
#: Rows of a large output, in each of its slabs: the last slab begins at row 2 ** 32.
ROWS, SLABS = 2**30, 5
DIM = 8


@dataclass(frozen=True)
class FarCase:
    """A launch, what is run of it, and what the outputs must hold (of a part: flat)."""

    launch: Launch
    part: Part
    wanted: tuple[mx.array, ...]


def far_strides(shape: tuple[int, ...], *, near_columns: bool = False) -> tuple[int, ...]:
    """Strides of more than 32 bits, such that none of their sums is another one's in 32 bits."""
    strides: list[int] = []
    count, small = 1, 1
    for axis in reversed(range(len(shape))):
        if near_columns and axis == len(shape) - 1:
            strides.insert(0, 1)
            small = 64
            continue
        strides.insert(0, count * FAR + small)
        count *= shape[axis]
        small *= 64
    return tuple(strides)


def _apart(launch: Launch, wanted: tuple[mx.array, ...], *, near_columns: bool = False) -> FarCase:
    strides = tuple(
        (number, far_strides(array.shape, near_columns=near_columns and array.ndim == 4))
        for number, array in enumerate(launch.arrays)
        if array.ndim
    )
    return FarCase(launch, Part(strides=strides), wanted)


def _row(seed: int, rows: int, slabs: int = SLABS, dim: int = DIM) -> mx.array:
    return random_array(seed, (1, slabs, rows, dim), mx.float16, "contiguous")


def _large(row: mx.array) -> mx.array:
    return mx.broadcast_to(row, (1, SLABS, ROWS, row.shape[3]))


def _last_slab(launch: Launch, group: int, wanted: list[mx.array]) -> FarCase:
    """One threadgroup of the last slab, and the rows that its outputs must hold."""
    height = launch.threadgroup[1]
    first = (SLABS - 1) * ROWS + group * height
    written = tuple((first * shape[3], height * shape[3]) for shape in launch.output_shapes)
    part = Part(groups=((0, group, SLABS - 1),), written=written)
    assert all(array.shape[0] == height for array in wanted)
    return FarCase(launch, part, tuple(array.reshape(-1) for array in wanted))


def inputs_apart(file: str) -> list[FarCase]:
    """Few elements, far apart along every axis, and packs that lie far apart."""
    ring, rows = (random_array(n, (2, 2, 3, DIM), mx.float16, "contiguous") for n in (1, 2))
    tiny, row = (random_array(n, (1, 1, 1, 4), mx.float32, "contiguous") for n in (3, 4))
    cells = mx.array([2, 0, 1, 2, 2, 0, 1, 0], mx.int32)
    if file == metal.RING_WRITE.file:
        two = rows[:, :, :2]
        mx.eval(two)
        launches = [
            (metal.ring_write(ring, two, 2), ops.ring_write(ring, two, 2)),
            (metal.ring_write(tiny, row, 0), row),
        ]
    elif file == metal.RING_JOIN.file:
        launches = [
            (metal.ring_join(ring, rows, 2, 2), ops.ring_join(ring, rows, 2, 2)),
            (metal.ring_join(tiny, row, 0, 1), ops.ring_join(tiny, row, 0, 1)),
        ]
    elif file == metal.CELL_GATHER.file:
        launches = [(metal.cell_gather(ring, cells), ops.cell_gather(ring, cells))]
    elif file == metal.CELL_SCATTER.file:
        pool = random_array(5, (2, 2, 4, DIM), mx.float16, "contiguous")
        to = mx.array([1, -1, 3, 9, 8, 7, 6, 5], mx.int32)
        eight = random_array(6, (2, 2, 8, DIM), mx.float16, "contiguous")
        wanted = ops.cell_scatter(pool, eight[:, :, 0:3:2], mx.array([1, 3]))
        launches = [(metal.cell_scatter(pool, eight, to), wanted)]
    else:
        old, new = (random_array(n, (2, 2, 3, 32), mx.float16, "contiguous") for n in (7, 8))
        pool = mx.quantize(old, group_size=32, bits=4)
        new = new[:, :, :2]
        mx.eval(new)
        wanted = ops.ring_write_quantized(*pool, new, 2, group_size=32, bits=4)
        launch = metal.ring_write_quantized(*pool, new, 2, cpu_rule=True)
        return [_apart(launch, wanted, near_columns=near) for near in (False, True)]
    return [
        _apart(launch, (wanted,), near_columns=near)
        for launch, wanted in launches
        for near in (False, True)
    ]


def outputs_far(file: str) -> list[FarCase]:
    """The last threadgroup of the last slab and the first one, in turn."""
    old = _row(1, 1)
    rows = _row(2, 300)
    last = rows[0, -1]
    many = mx.broadcast_to(old[0, -1], (256, DIM))
    start = ROWS - 200
    if file == metal.RING_WRITE.file:
        launch = metal.ring_write(_large(old), rows, start)
        end = mx.concatenate([many[:56], last[:200]])
        beginning = mx.concatenate([last[200:], many[:156]])
        return [
            _last_slab(launch, ROWS // 256 - 1, [end]),
            _last_slab(launch, 0, [beginning]),
        ]
    if file == metal.RING_JOIN.file:
        launch = metal.ring_join(_large(old), rows, 5, ROWS - 300)
        return [
            _last_slab(launch, ROWS // 256 - 1, [last[44:]]),
            _last_slab(launch, 0, [many]),
        ]
    if file == metal.CELL_GATHER.file:
        launch = metal.cell_gather(rows, mx.broadcast_to(mx.array([7], mx.int32), (ROWS,)))
        return [
            _last_slab(launch, group, [mx.broadcast_to(last[7], (256, DIM))])
            for group in (ROWS // 256 - 1, 0)
        ]
    if file == metal.CELL_SCATTER.file:
        cells = mx.arange(ROWS - 150, ROWS + 150, dtype=mx.int32) % ROWS
        launch = metal.cell_scatter(_large(old), rows, cells)
        return [
            _last_slab(launch, ROWS // 256 - 1, [mx.concatenate([many[:106], last[:150]])]),
            _last_slab(launch, 0, [mx.concatenate([last[150:], many[:106]])]),
        ]
    old, rows = _row(3, 1, dim=32), _row(4, 100, dim=32)
    pool = mx.quantize(old, group_size=32, bits=4)
    new = mx.quantize(rows, group_size=32, bits=4)
    launch = metal.ring_write_quantized(*map(_large, pool), rows, ROWS - 40, cpu_rule=True)
    held = [mx.broadcast_to(array[0, -1], (64, array.shape[3])) for array in pool]
    end = [mx.concatenate([a[:24], b[0, -1, :40]]) for a, b in zip(held, new, strict=True)]
    beginning = [mx.concatenate([b[0, -1, 40:], a[:4]]) for a, b in zip(held, new, strict=True)]
    return [_last_slab(launch, ROWS // 64 - 1, end), _last_slab(launch, 0, beginning)]


def cases(file: str) -> list[FarCase]:
    """All of them."""
    return [*inputs_apart(file), *outputs_far(file)]
