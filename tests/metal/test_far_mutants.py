"""Offsets that need 64 bits: each kernel has them right, and each one narrowed is seen."""

from __future__ import annotations

import re

import pytest

from mlx_kvcache.store.metal import read_source
from tests.support.arrays import bits

from . import far
from .conftest import COMPILERS, compiler_named
from .host import build, executor
from .kernel_cases import FILES, GATHER, HEADER, JOIN, QUANTIZED, SCATTER, WRITE

#: (file, text, which of its occurrences, replacement, kernel to run)
Narrowing = tuple[str, str, int, str, str]


def narrowings() -> list[Narrowing]:
    """Every place where an offset of more than 32 bits is computed, narrowed in turn."""
    found: list[Narrowing] = [
        (HEADER, "int64_t step", 0, "int step", WRITE),
        (HEADER, "int64_t step", 0, "uint step", JOIN),
        (HEADER, "int64_t step", 1, "int step", WRITE),
        (HEADER, "[i * step]", 0, "[int(i * step)]", GATHER),
        (HEADER, "[i * step]", 1, "[uint(i * step)]", JOIN),
        (HEADER, "inline int64_t element_offset", 0, "inline int element_offset", SCATTER),
        (HEADER, "inline int64_t element_offset", 0, "inline uint element_offset", QUANTIZED),
        *((HEADER, f"strides[{axis}]", 0, f"int(strides[{axis}])", kernel)
          for axis, kernel in enumerate((WRITE, JOIN, SCATTER, QUANTIZED))),
        (SCATTER, "cells_strides[0]", 0, "int(cells_strides[0])", SCATTER),
        (GATHER, "cells_strides[0]", 0, "int(cells_strides[0])", GATHER),
    ]  # fmt: skip
    for file in FILES:
        source = read_source(file)
        for number, _ in enumerate(re.finditer("const int64_t", source)):
            narrow = "const uint" if number % 2 else "const int"
            found.append((file, "const int64_t", number, narrow, file))
        # A product in 32 bits, widened when it is too late.
        found.append((file, "int64_t(slab)", 0, "slab", file))
        for text in re.findall(r"\b\w+\[element_offset\(", source):
            found.append((file, text, 0, text.replace("[", "[(uint)"), file))
        for text in re.findall(r"\w+ \+ (?:from|to)\b", source):
            narrow = re.sub(r"(\w+)$", r"uint(\1)", text)
            found.append((file, text, 0, narrow, file))
    return found


NARROWINGS = narrowings()


def narrowed(mutant: Narrowing) -> executor.Text:
    file, text, occurrence, replacement, _ = mutant
    source = read_source(file)
    at = [found.start() for found in re.finditer(re.escape(text), source)][occurrence]
    mutated = source[:at] + replacement + source[at + len(text) :]
    return executor.Text(header=mutated) if file == HEADER else executor.Text(mutated)


def verdicts(file: str, text: executor.Text, compiler: build.Compiler) -> set[str]:
    found: set[str] = set()
    for case in far.cases(file):
        outputs, findings = executor.examine(
            case.launch, compiler, text=text, part=case.part, seeds=(0,)
        )
        found |= {finding.kind for finding in findings}
        for got, expected in zip(outputs, case.wanted, strict=False):
            if not (bits(got) == bits(expected)).all():
                found.add("differs")
    return found


@pytest.fixture(scope="module")
def ready() -> list[build.Compiler]:
    """The compilers, of which each has compiled its share of the mutants."""
    compilers = [compiler_named(name) for name in COMPILERS]
    for share, compiler in enumerate(compilers):
        executor.prepare(
            [
                (launch, narrowed(mutant))
                for number, mutant in enumerate(NARROWINGS)
                if number % len(compilers) == share
                for launch in {c.launch.name: c.launch for c in far.cases(mutant[4])}.values()
            ],
            compiler,
        )
    return compilers


@pytest.mark.metal_host
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NARROWINGS)))
def test_a_narrowed_offset_is_seen(ready: list[build.Compiler], number: int) -> None:
    mutant = NARROWINGS[number]
    found = verdicts(mutant[4], narrowed(mutant), ready[number % len(ready)])
    assert found & {"out-of-range", "unwritten", "differs"}, mutant


@pytest.mark.parametrize("file", FILES)
def test_the_kernels_themselves_reach_that_far(compiler: build.Compiler, file: str) -> None:
    assert verdicts(file, executor.FILES, compiler) == set()


@pytest.mark.parametrize("file", FILES)
def test_the_offsets_really_need_more_than_32_bits(file: str) -> None:
    for case in far.inputs_apart(file):
        assert all(min(abs(s) for s in strides) > 2**32 or 1 in strides
                   for _, strides in case.part.strides)  # fmt: skip
    for case in far.outputs_far(file):
        assert all(first >= 2**32 for first, _ in case.part.written)
