"""Launches of each kernel with the outputs that they must have: for mutants of the kernels."""

from __future__ import annotations

import mlx.core as mx

from mlx_kvcache.store import metal, ops
from mlx_kvcache.store.metal import Launch
from tests.support.kernel_arrays import laid_out, random_array

from .test_quantized_kernel import tie_rows

Case = tuple[Launch, tuple[mx.array, ...]]
WRITE, JOIN = metal.RING_WRITE.file, metal.RING_JOIN.file
QUANTIZED = metal.RING_WRITE_QUANTIZED.file
SCATTER, GATHER = metal.CELL_SCATTER.file, metal.CELL_GATHER.file
FILES = (WRITE, JOIN, QUANTIZED, SCATTER, GATHER)
HEADER = metal.SHARED_HEADER


def _normal(seed: int, rows: int, layout: str = "contiguous") -> mx.array:
    return random_array(seed, (2, 2, rows, 16), mx.float32, layout)


def _ring_writes() -> list[Case]:
    ring = _normal(1, 6, "transposed")
    rows = _normal(2, 4, "transposed")
    pairs = [(ring, rows), (ring, _normal(2, 13)), (_normal(1, 6, "mirrored"), rows)]
    pairs += [(ring, _normal(2, 4, layout)) for layout in ("spaced", "mirrored", "constant")]
    cases = [(metal.ring_write(*pair, 4), (ops.ring_write(*pair, 4),)) for pair in pairs]
    for start in (-2, 10, -8):
        launch = metal.ring_write(ring, rows, mx.array(start))
        cases.append((launch, (ops.ring_write(ring, rows, start % 6),)))
    return cases


def _ring_joins() -> list[Case]:
    ring, rows = _normal(1, 6, "transposed"), _normal(2, 4, "transposed")
    wanted = ops.ring_join(ring, rows, 4, 5)
    cases = [(metal.ring_join(ring, rows, slot, 5), (wanted,)) for slot in (4, mx.array(4))]
    for slot in (-2, 10, -8):
        cases.append((metal.ring_join(ring, rows, mx.array(slot), 5), (wanted,)))
    for layout in ("spaced", "mirrored", "constant"):
        pair = _normal(3, 6, layout), _normal(4, 4, layout)
        cases.append((metal.ring_join(*pair, 4, 5), (ops.ring_join(*pair, 4, 5),)))
    return cases


def _quantized_writes() -> list[Case]:
    negative = -2 - mx.abs(random_array(3, (1, 1, 3, 64), mx.float32, "contiguous"))
    mixed = random_array(4, (1, 1, 3, 64), mx.float32, "contiguous")
    plain = mx.quantize(mx.ones((1, 1, 4, 64)), group_size=32, bits=4)
    cases = []
    for new in (tie_rows(mx.float32, 64), negative, mixed):
        wanted = ops.ring_write_quantized(*plain, new, 2, group_size=32, bits=4)
        cases.append((metal.ring_write_quantized(*plain, new, 2, cpu_rule=True), wanted))
    for start in (-2, 6):
        launch = metal.ring_write_quantized(*plain, mixed, mx.array(start), cpu_rule=True)
        cases.append((launch, ops.ring_write_quantized(*plain, mixed, 2, group_size=32, bits=4)))
    old = random_array(5, (2, 2, 4, 64), mx.float32, "contiguous")
    parts = mx.quantize(old, group_size=32, bits=4)
    orders = [("spaced", "mirrored", "transposed"), ("transposed", "spaced", "mirrored")]
    orders.append(("mirrored", "reversed", "spaced"))
    for order in orders:
        pool = [laid_out(part, layout) for part, layout in zip(parts, order, strict=True)]
        new = random_array(6, (2, 2, 3, 64), mx.float32, order[0])
        wanted = ops.ring_write_quantized(*parts, new, 2, group_size=32, bits=4)
        cases.append((metal.ring_write_quantized(*pool, new, 2, cpu_rule=True), wanted))
    return cases


def _scatters() -> list[Case]:
    pool = random_array(5, (1, 2, 40, 16), mx.float32, "contiguous")
    rows = random_array(6, (1, 2, 10, 16), mx.float32, "contiguous")
    cells = mx.array([3, 39, 17, 16, 0, 5, 30, 31, 32, 8])
    doubled = mx.array([3, 39, 17, 16, 0, 5, 30, 31, 32, 3])
    # The definition, row by row: the last row of a cell stays.
    ordered = pool
    for row, cell in enumerate(doubled.tolist()):
        ordered = ops.place(ordered, rows[:, :, row : row + 1], cell)
    reverse = cells[::-1]
    mx.eval(reverse)
    plain = ops.cell_scatter(pool, rows, cells)
    other = ops.cell_scatter(pool, rows, reverse)
    spaced, mirrored = laid_out(pool, "spaced"), laid_out(rows, "mirrored")
    return [
        (metal.cell_scatter(pool, rows, cells), (plain,)),
        (metal.cell_scatter(pool, rows, doubled), (ordered,)),
        (metal.cell_scatter(spaced, rows, reverse), (other,)),
        (metal.cell_scatter(pool, mirrored, cells), (plain,)),
    ]


def _gathers() -> list[Case]:
    pool = random_array(5, (1, 2, 40, 16), mx.float32, "contiguous")
    reverse = mx.array([3, 39, 17, 16, 0, 5, 30, 31, 32, 8])[::-1]
    outside = mx.array([3, -1, 40, 2, 5, 6, 7, 8])
    nearest = mx.array([3, 0, 39, 2, 5, 6, 7, 8])
    mx.eval(reverse)
    cases = [
        (metal.cell_gather(pool, reverse), (ops.cell_gather(pool, reverse),)),
        (metal.cell_gather(pool, outside), (ops.cell_gather(pool, nearest),)),
    ]
    launch = metal.cell_gather(pool, reverse, 16)
    cases.append((launch, (ops.cell_gather(pool, reverse, 16),)))
    for layout in ("spaced", "mirrored"):
        launch = metal.cell_gather(laid_out(pool, layout), reverse)
        cases.append((launch, (ops.cell_gather(pool, reverse),)))
    return cases


def cases(file: str) -> list[Case]:
    """The launches of one kernel, with their outputs."""
    makers = {
        WRITE: _ring_writes,
        JOIN: _ring_joins,
        QUANTIZED: _quantized_writes,
        SCATTER: _scatters,
        GATHER: _gathers,
    }
    return makers[file]()
