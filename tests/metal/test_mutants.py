"""Small faults put into the real kernels: the ordinary checks see each of them."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import pytest

from mlx_kvcache.store import metal
from mlx_kvcache.store.metal import read_source
from tests.support.arrays import bits

from .host import build, executor
from .kernel_cases import FILES, GATHER, HEADER, JOIN, QUANTIZED, SCATTER, WRITE, cases

FIRST_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\nfor"
LAST_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\nconst"
WEAK_BARRIERS = (
    "",
    "threadgroup_barrier(mem_flags::mem_device);",
    "threadgroup_barrier(mem_flags::mem_none);",
    "simdgroup_barrier(mem_flags::mem_threadgroup);",
)


class Mutant(NamedTuple):
    """`text` of a file becomes `replacement`; `found` is a kind of finding, or "differs"."""

    file: str
    text: str
    replacement: str
    found: str
    kernel: str = ""

    def apply(self) -> executor.Text:
        """The mutated text."""
        source = read_source(self.file)
        assert self.text in source, f"{self.file} has no {self.text!r} any more"
        mutated = source.replace(self.text, self.replacement)
        return executor.Text(header=mutated) if self.file == HEADER else executor.Text(mutated)

    @property
    def runs(self) -> str:
        """The kernel that is run with it."""
        return self.kernel or self.file


ELEMENT = "element_offset({0}_shape, {0}_strides, slab, slot, {1})"
MUTANTS = [Mutant(*fields) for fields in (
    (WRITE, "if (row >= 0)", "if (row > 0)", "differs"),
    (WRITE, "ring_slot(start_slot, slots)", "ring_slot(start_slot + 1, slots)", "differs"),
    (WRITE, "ring_slot(start_slot, slots)", "uint(start_slot)", "differs"),
    (WRITE, "* PACK;", "* PACK + 1;", "out-of-range"),
    (WRITE, "(rows + from, rows_strides[3])", "(rows + from, 1)", "out-of-range"),
    (WRITE, "(ring + from, ring_strides[3])", "(ring + from, 1)", "differs"),
    (WRITE, "int64_t(slab) * slots", "int64_t(slab / 2) * slots", "written-twice"),
    (JOIN, "index - old_rows", "index", "out-of-range"),
    (JOIN, ") % slots", ")", "out-of-range"),
    (JOIN, "index < old_rows", "index <= old_rows", "differs"),
    (JOIN, "ring_slot(first_slot, slots)", "uint(first_slot)", "differs"),
    (JOIN, "(ring + from, ring_strides[3])", "(ring + from, 1)", "out-of-range"),
    (JOIN, "(rows + from, rows_strides[3])", "(rows + from, 1)", "out-of-range"),
    (QUANTIZED, "CPU_RULE ? rint(steps) : round(steps)", "round(steps)", "differs"),
    (QUANTIZED, "CPU_RULE ? rint(ratio) : round(ratio)", "ratio", "differs"),
    (QUANTIZED, "CPU_RULE ? -INFINITY : 0.0f", "0.0f", "differs"),
    (QUANTIZED, "scale = edge / edge_steps;", "", "differs"),
    (QUANTIZED, "<< (BITS * i)", "<< (BITS * (i + 1))", "undefined"),
    (QUANTIZED, "distance < LANES", "distance < LANES / 2", "differs"),
    (QUANTIZED, "if (leads_group) {\n  scales_out", "if (true) {\n  scales_out", "written-twice"),
    (QUANTIZED, "if (row < 0) {", "if (false) {", "differs"),
    (QUANTIZED, ELEMENT.format("words", "word"), "word_to", "out-of-range"),
    (QUANTIZED, ELEMENT.format("scales", "group"), "group_to", "out-of-range"),
    (QUANTIZED, ELEMENT.format("biases", "group"), "group_to", "out-of-range"),
    (QUANTIZED, "scales_strides", "words_strides", "out-of-range"),
    (QUANTIZED, "biases_strides", "scales_strides", "out-of-range"),
    (QUANTIZED, "(rows + from, rows_strides[3])", "(rows + from, 1)", "out-of-range"),
    (QUANTIZED, "ring_slot(start_slot, slots)", "uint(start_slot)", "differs"),
    *((SCATTER, FIRST_BARRIER, f"{weak}\nfor", "race") for weak in WEAK_BARRIERS),
    *((SCATTER, LAST_BARRIER, f"{weak}\nconst", "race") for weak in WEAK_BARRIERS),
    (SCATTER, "atomic_fetch_max_explicit", "atomic_exchange_explicit", "race"),
    (SCATTER, "TILE = 256", "TILE = 2", "out-of-range"),
    (SCATTER, "TILE = 256", "TILE = 8193", "limit"),
    (SCATTER, "-1, memory_order", "0, memory_order", "differs"),
    (SCATTER, "cells[i * cells_strides[0]]", "cells[i]", "out-of-range"),
    (SCATTER, "(rows + from, rows_strides[3])", "(rows + from, 1)", "out-of-range"),
    (SCATTER, "(pool + from, pool_strides[3])", "(pool + from, 1)", "out-of-range"),
    (GATHER, "clamp(int(cells[row * cells_strides[0]]), 0, pool_shape[2] - 1)",
     "cells[row * cells_strides[0]]", "out-of-range"),
    (GATHER, "row * cells_strides[0]", "row", "out-of-range"),
    (GATHER, "row < uint", "row <= uint", "out-of-range"),
    (GATHER, "pack.lane[i] = static_cast<T>(0.0f);", "", "uninitialized-read"),
    (GATHER, "(pool + from, pool_strides[3])", "(pool + from, 1)", "out-of-range"),
    (HEADER, "step == 1", "step <= 1", "out-of-range", WRITE),
    (HEADER, "step == 1", "step >= 0", "out-of-range", WRITE),
    (HEADER, "step == 1", "step != 0", "out-of-range", WRITE),
    (HEADER, "step == 1", "(step == 1 || step == -1)", "out-of-range", WRITE),
    (HEADER, "step == 1", "true", "out-of-range", JOIN),
    (HEADER, "source[i * step]", "source[i * (step < 0 ? -step : step)]", "out-of-range", WRITE),
    (HEADER, "source[i * step]", "source[i * (step == 0 ? 1 : step)]", "out-of-range", JOIN),
    (HEADER, "slot < 0 ? uint(slot + int(slots)) : uint(slot)", "uint(slot)", "differs", JOIN),
)]  # fmt: skip


def verdicts(file: str, text: executor.Text, compiler: build.Compiler) -> set[str]:
    """All that is wrong with a kernel of this text, over the launches of its file."""
    found: set[str] = set()
    for launch, wanted in cases(file):
        outputs, findings = executor.examine(launch, compiler, text=text)
        found |= {finding.kind for finding in findings}
        for got, expected in zip(outputs, wanted, strict=False):
            if not (bits(got) == bits(expected)).all():
                found.add("differs")
    return found


@pytest.fixture(scope="module")
def ready(compiler: build.Compiler) -> build.Compiler:
    """The compiler, with all mutants compiled."""
    mutated = [
        (launch, mutant.apply())
        for mutant in MUTANTS
        for launch in {each.name: each for each, _ in cases(mutant.runs)}.values()
    ]
    executor.prepare(mutated, compiler)
    return compiler


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_mutant_is_seen(ready: build.Compiler, number: int) -> None:
    mutant = MUTANTS[number]
    assert mutant.found in verdicts(mutant.runs, mutant.apply(), ready)


@pytest.mark.parametrize("file", FILES)
def test_the_kernels_themselves_pass_the_same_launches(compiler: build.Compiler, file: str) -> None:
    assert verdicts(file, executor.FILES, compiler) == set()


def many_rows(file: str) -> metal.Launch:
    """A launch whose grid would fill a threadgroup of any size."""
    ring = mx.zeros((1, 1, 2048, 4))
    rows, cells = ring[:, :, :9], mx.arange(9)
    if file == WRITE:
        return metal.ring_write(ring, rows, 0)
    if file == JOIN:
        return metal.ring_join(ring, rows, 0, 2048)
    if file == GATHER:
        return metal.cell_gather(ring, mx.arange(2048))
    if file == SCATTER:
        return metal.cell_scatter(ring, rows, cells)
    pool = mx.quantize(mx.zeros((1, 1, 2048, 32)), group_size=32, bits=4)
    return metal.ring_write_quantized(*pool, mx.ones((1, 1, 9, 32)), 0, cpu_rule=True)


@pytest.mark.parametrize("file", FILES)
def test_no_threadgroup_may_be_too_large(
    compiler: build.Compiler, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, findings = executor.examine(many_rows(file), compiler, seeds=(0,))
    assert findings == ()
    monkeypatch.setattr(metal, "GROUP_THREADS", 2048)
    launch = many_rows(file)
    assert launch.threadgroup[0] * launch.threadgroup[1] == 2048
    _, findings = executor.examine(launch, compiler, seeds=(0,))
    assert [finding.kind for finding in findings] == ["limit"]


def test_a_threadgroup_of_more_cells_than_a_tile_is_seen(
    compiler: build.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal, "GROUP_THREADS", 512)
    _, findings = executor.examine(many_rows(SCATTER), compiler, seeds=(0,))
    assert "out-of-range" in {finding.kind for finding in findings}
