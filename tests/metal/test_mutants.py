"""Small faults put into the real kernels: the ordinary checks see each of them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store import ops as kernel_ops
from mlx_kvcache.store.metal import Launch, read_source
from tests.support.arrays import bits
from tests.support.kernel_arrays import random_array

from .host import build, executor
from .test_quantized_kernel import tie_rows

WRITE, JOIN = "ring_write.metal", "ring_join.metal"
QUANTIZED, SCATTER, GATHER = "ring_write_quantized.metal", "cell_scatter.metal", "cell_gather.metal"

#: (file, text, replacement, what must be found: a kind of finding, or "differs")
MUTANTS = (
    (WRITE, "if (row >= 0)", "if (row > 0)", "differs"),
    (WRITE, "ring_slot(start_slot, slots)", "ring_slot(start_slot + 1, slots)", "differs"),
    (WRITE, "* PACK;", "* PACK + 1;", "out-of-range"),
    (WRITE, "(rows + from, rows_strides[3])", "(rows + from, 1)", "out-of-range"),
    (WRITE, "int64_t(slab) * slots", "int64_t(slab / 2) * slots", "written-twice"),
    (JOIN, "index - old_rows", "index", "out-of-range"),
    (JOIN, ") % slots", ")", "out-of-range"),
    (JOIN, "index < old_rows", "index <= old_rows", "differs"),
    (QUANTIZED, "CPU_RULE ? rint(steps) : round(steps)", "round(steps)", "differs"),
    (QUANTIZED, "CPU_RULE ? rint(ratio) : round(ratio)", "ratio", "differs"),
    (QUANTIZED, "CPU_RULE ? -INFINITY : 0.0f", "0.0f", "differs"),
    (QUANTIZED, "scale = edge / edge_steps;", "", "differs"),
    (QUANTIZED, "<< (BITS * i)", "<< (BITS * (i + 1))", "undefined"),
    (QUANTIZED, "distance < LANES", "distance < LANES / 2", "differs"),
    (QUANTIZED, "if (leads_group) {\n  scales_out", "if (true) {\n  scales_out", "written-twice"),
    (QUANTIZED, "if (row < 0) {", "if (false) {", "differs"),
    (SCATTER, "threadgroup_barrier(mem_flags::mem_threadgroup);\nconst int row",
     "const int row", "order-dependent"),
    (SCATTER, "atomic_fetch_max_explicit", "atomic_exchange_explicit", "order-dependent"),
    (SCATTER, "TILE = 256", "TILE = 2", "out-of-range"),
    (SCATTER, "-1, memory_order", "0, memory_order", "differs"),
    (GATHER, "clamp(int(cells[row * cells_strides[0]]), 0, pool_shape[2] - 1)",
     "cells[row * cells_strides[0]]", "out-of-range"),
    (GATHER, "row * cells_strides[0]", "row", "out-of-range"),
)  # fmt: skip


def launches(file: str) -> list[tuple[Launch, tuple[mx.array, ...]]]:
    """Launches of one kernel with the outputs that they must have."""
    ring = random_array(1, (2, 2, 6, 16), mx.float32, "transposed")
    rows = random_array(2, (2, 2, 4, 16), mx.float32, "transposed")
    many = random_array(2, (2, 2, 13, 16), mx.float32, "contiguous")
    gaps = mx.repeat(rows, 2, axis=3)[..., ::2]
    mx.eval(gaps)
    if file == WRITE:
        return [
            (metal_kernels.ring_write(ring, new, 4), (kernel_ops.ring_write(ring, new, 4),))
            for new in (rows, many, gaps)
        ]
    if file == JOIN:
        wanted = kernel_ops.ring_join(ring, rows, 4, 5)
        return [(metal_kernels.ring_join(ring, rows, 4, 5), (wanted,))]
    if file == QUANTIZED:
        cases = []
        negative = -2 - mx.abs(random_array(3, (1, 1, 3, 64), mx.float32, "contiguous"))
        mixed = random_array(4, (1, 1, 3, 64), mx.float32, "contiguous")
        for new in (tie_rows(mx.float32, 64), negative, mixed):
            pool = mx.quantize(mx.ones((1, 1, 4, 64)), group_size=32, bits=4)
            wanted = kernel_ops.ring_write_quantized(*pool, new, 2, group_size=32, bits=4)
            launch = metal_kernels.ring_write_quantized(*pool, new, 2, cpu_rule=True)
            cases.append((launch, wanted))
        return cases
    pool = random_array(5, (1, 2, 40, 16), mx.float32, "contiguous")
    cells = mx.array([3, 39, 17, 16, 0, 5, 30, 31, 32, 8])
    if file == SCATTER:
        rows = random_array(6, (1, 2, 10, 16), mx.float32, "contiguous")
        doubled = mx.array([3, 39, 17, 16, 0, 5, 30, 31, 32, 3])
        # The definition, row by row: the last row of a cell stays.
        ordered = pool
        for row, cell in enumerate(doubled.tolist()):
            ordered = kernel_ops.place(ordered, rows[:, :, row : row + 1], cell)
        return [
            (
                metal_kernels.cell_scatter(pool, rows, cells),
                (kernel_ops.cell_scatter(pool, rows, cells),),
            ),
            (metal_kernels.cell_scatter(pool, rows, doubled), (ordered,)),
        ]
    reverse = cells[::-1]
    outside = mx.array([3, -1, 40, 2, 5, 6, 7, 8])
    mx.eval(reverse)
    nearest = mx.array([3, 0, 39, 2, 5, 6, 7, 8])
    return [
        (metal_kernels.cell_gather(pool, reverse), (kernel_ops.cell_gather(pool, reverse),)),
        (metal_kernels.cell_gather(pool, outside), (kernel_ops.cell_gather(pool, nearest),)),
    ]


def verdicts(file: str, body: str, compiler: build.Compiler) -> set[str]:
    """All that is wrong with a kernel of this text, over the launches of its file."""
    found: set[str] = set()
    for launch, wanted in launches(file):
        outputs, findings = executor.examine(launch, compiler, body=body)
        found |= {finding.kind for finding in findings}
        for got, expected in zip(outputs, wanted, strict=False):
            if not (bits(got) == bits(expected)).all():
                found.add("differs")
    return found


@pytest.fixture(scope="module")
def ready(compiler: build.Compiler) -> build.Compiler:
    """The compiler, with all mutants compiled."""
    mutated = [
        (launch, read_source(file).replace(text, replacement))
        for file, text, replacement, _ in MUTANTS
        for launch in {each.name: each for each, _ in launches(file)}.values()
    ]
    executor.prepare(list(mutated), compiler)
    return compiler


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_mutant_is_seen(ready: build.Compiler, number: int) -> None:
    file, text, replacement, kind = MUTANTS[number]
    source = read_source(file)
    assert source.count(text) >= 1, f"{file} has no {text!r} any more"
    assert kind in verdicts(file, source.replace(text, replacement), ready)


@pytest.mark.parametrize("file", [WRITE, JOIN, QUANTIZED, SCATTER, GATHER])
def test_the_kernels_themselves_pass_the_same_launches(compiler: build.Compiler, file: str) -> None:
    assert verdicts(file, read_source(file), compiler) == set()
