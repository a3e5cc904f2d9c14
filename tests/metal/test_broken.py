"""Deliberately broken kernels: each is caught, for its own reason, at its own line.

A comment `// expect: KIND ...` names the findings of its line; on the first line it stands for
those of the kernel as a whole. Of several marked lines at least one must be reported, since which
of two conflicting accesses comes second depends on the order of the threads.
"""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_kvcache.store.metal import Kernel, Launch

from .host import build, executor

FOLDER = Path(__file__).parent / "broken"
NAMES = sorted(path.stem for path in FOLDER.glob("*.metal"))
_EXPECT = re.compile(r"// expect: ([a-z -]+)$")


def expectations(source: str) -> dict[int, set[str]]:
    """Line number to the kinds that it expects."""
    found = {}
    for number, line in enumerate(source.splitlines(), 1):
        match = _EXPECT.search(line)
        if match:
            found[number] = set(match[1].split())
    return found


def launch_of(name: str) -> Launch:
    """128 numbers in two threadgroups of 64, a strided view, and a tiny array."""
    x = mx.arange(128, dtype=mx.float32)
    strided = mx.arange(256, dtype=mx.float32).reshape(64, 4)[:, :2]
    tiny = mx.array([1.0, 2.0, 3.0])
    mx.eval(x, strided, tiny)
    return Launch(
        kernel=Kernel(f"{name}.metal", ("x", "strided", "tiny"), ("out",)),
        name=name,
        arrays=(x, strided, tiny),
        template=(),
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=((128,),),
        output_dtypes=(mx.float32,),
    )


@pytest.fixture(scope="module")
def ready(compiler: build.Compiler) -> build.Compiler:
    """The compiler, with all of the folder compiled."""
    sources = [(name, (FOLDER / f"{name}.metal").read_text(encoding="utf-8")) for name in NAMES]
    executor.prepare([(launch_of(name), executor.Text(source)) for name, source in sources], compiler)
    return compiler


@pytest.mark.parametrize("name", NAMES)
def test_each_broken_kernel_is_caught_for_its_own_reason(ready: build.Compiler, name: str) -> None:
    source = (FOLDER / f"{name}.metal").read_text(encoding="utf-8")
    expected = expectations(source)
    assert expected, f"{name} says nothing of what is wrong with it"
    _, findings = executor.examine(launch_of(name), ready, text=executor.Text(source))
    assert findings, f"{name} was not caught"
    for finding in findings:
        assert finding.file == f"{name}.metal", str(finding)
        assert finding.kind in expected.get(finding.line, set()), str(finding)


def test_the_reasons_are_many() -> None:
    kinds = set()
    for name in NAMES:
        for each in expectations((FOLDER / f"{name}.metal").read_text(encoding="utf-8")).values():
            kinds |= each
    assert kinds == {
        "address",
        "barrier-divergence",
        "inactive-lane",
        "input-written",
        "misaligned",
        "order-dependent",
        "out-of-range",
        "race",
        "rejected",
        "simd-divergence",
        "undefined",
        "uninitialized-read",
        "unwritten",
        "written-twice",
    }


def test_a_sound_kernel_has_no_findings(compiler: build.Compiler) -> None:
    """The same launch, so that a finding above is the kernel's and not the executor's."""
    body = """
threadgroup float tile[64];
const uint i = thread_position_in_threadgroup.x;
const uint first = thread_position_in_grid.x - i;
float sum = 0.0f;
for (int round = 0; round < 2; ++round) {
  tile[i] = x[first + i] + float(round);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum += tile[63 - i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
sum += simd_max(strided[(i % 64) * strided_strides[0]]) + tiny[i % 3];
out[first + i] = sum;
"""
    outputs, findings = executor.examine(launch_of("sound"), compiler, text=executor.Text(body))
    assert findings == ()
    assert len(set(outputs[0].tolist())) > 60
