"""Deliberately broken kernels: each is caught, for its own reason, at its own line.

A comment `// expect: KIND ...` names the findings of its line; on the first line it stands for
those of the kernel as a whole. Of several marked lines at least one must be reported, since which
of two conflicting accesses comes second depends on the order of the threads.
"""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
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
    """128 numbers in two threadgroups of 64, a strided view, a tiny array, and a far one."""
    x = mx.arange(128, dtype=mx.float32)
    strided = mx.arange(256, dtype=mx.float32).reshape(64, 4)[:, :2]
    tiny = mx.array([1.0, 2.0, 3.0])
    far = mx.arange(8, dtype=mx.float32)
    mx.eval(x, strided, tiny, far)
    return Launch(
        kernel=Kernel(f"{name}.metal", ("x", "strided", "tiny", "far"), ("out",)),
        name=name,
        arrays=(x, strided, tiny, far),
        template=(),
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=((128,),),
        output_dtypes=(mx.float32,),
    )


#: The elements of `far` lie so far apart that an offset of 32 bits falls between them.
PART = executor.Part(strides=((3, (2**30 + 5,)),))


@pytest.fixture(scope="module")
def ready(compiler: build.Compiler) -> build.Compiler:
    """The compiler, with all of the folder compiled."""
    sources = [(name, (FOLDER / f"{name}.metal").read_text(encoding="utf-8")) for name in NAMES]
    executor.prepare(
        [(launch_of(name), executor.Text(source)) for name, source in sources], compiler
    )
    return compiler


@pytest.mark.parametrize("name", NAMES)
def test_each_broken_kernel_is_caught_for_its_own_reason(ready: build.Compiler, name: str) -> None:
    source = (FOLDER / f"{name}.metal").read_text(encoding="utf-8")
    expected = expectations(source)
    assert expected, f"{name} says nothing of what is wrong with it"
    _, findings = executor.examine(launch_of(name), ready, text=executor.Text(source), part=PART)
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
        "limit",
        "misaligned",
        "order-dependent",
        "out-of-range",
        "race",
        "recursion",
        "rejected",
        "simd-divergence",
        "undefined",
        "uninitialized-read",
        "unwritten",
        "written-twice",
    }


SOUND = {
    "a tile used twice": """
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
""",
    "wide loads": """
const uint i = thread_position_in_grid.x;
const float4 four = ((const device float4*)x)[i / 4];
threadgroup float4 tile[64];
const uint place = thread_position_in_threadgroup.x;
tile[place] = four;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = tile[place][i % 4] + ((const threadgroup float4*)tile)[place].x;
""",
    "a sum over half of a simdgroup before a barrier": """
const uint i = thread_position_in_grid.x;
float sum = x[i];
if (thread_index_in_simdgroup < 16) {
  sum = simd_sum(x[i]);
}
threadgroup_barrier(mem_flags::mem_none);
out[i] = sum;
""",
    "a sum over half of a simdgroup that then sums as a whole": """
const uint i = thread_position_in_grid.x;
float sum = x[i];
if (thread_index_in_simdgroup % 2 == 1) {
  sum = simd_sum(sum);
}
out[i] = simd_sum(sum) + x[i];
""",
    "lanes that go round a loop more often than others": """
const uint i = thread_position_in_grid.x;
float sum = 0.0f;
for (uint round = 0; round < 1 + thread_index_in_simdgroup % 3; ++round) {
  sum += simd_sum(x[i]);
}
out[i] = simd_max(sum) + x[i];
""",
    "lanes that have returned": """
const uint i = thread_position_in_grid.x;
out[i] = x[i];
if (thread_index_in_simdgroup >= 20) {
  return;
}
if (simd_sum(x[i]) < 0.0f) {
  return;
}
""",
    "atomics that may come in any order": """
threadgroup atomic_int most;
threadgroup atomic_uint flags;
const uint i = thread_position_in_grid.x;
atomic_store_explicit(&most, 0, memory_order_relaxed);
atomic_store_explicit(&flags, 0u, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
atomic_fetch_max_explicit(&most, int(i), memory_order_relaxed);
atomic_fetch_or_explicit(&flags, 1u << (i % 32), memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = x[i] + float(atomic_load_explicit(&most, memory_order_relaxed)) +
    float(popcount(atomic_load_explicit(&flags, memory_order_relaxed)));
""",
    "words and symbols that only look wrong": """
// A "string" and a double, in a comment; new, static, goto.
static_assert(sizeof(float) == 4, "a message is no string of the kernel");
constexpr uint static_count = 3;
const uint i = thread_position_in_grid.x;
const int doubled = int(i) * int(static_count);
const bool both = (i > 3u) & (i < 100u);
out[i] = x[i] + float(doubled & 1) + (both && i != 0 ? 0.5 : 1e-3);
""",
    "locals without a value that get one": """
const uint i = thread_position_in_grid.x;
float lanes[4], sum;
Pack<float, 2> pack;
for (int lane = 0; lane < 4; ++lane) {
  lanes[lane] = x[i] + float(lane);
}
sum = lanes[3];
pack.lane[1] = sum;
out[i] = pack.lane[1];
""",
    "offsets of 64 bits": """
const uint i = thread_position_in_grid.x;
out[i] = x[i] + far[int64_t(i % 8) * far_strides[0]];
""",
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_has_no_findings(compiler: build.Compiler, name: str) -> None:
    """The same launch, so that a finding above is the kernel's and not the executor's."""
    text = executor.Text(SOUND[name])
    outputs, findings = executor.examine(launch_of("sound"), compiler, text=text, part=PART)
    assert findings == ()
    assert len(set(outputs[0].tolist())) > 60


def test_a_sum_over_half_of_a_simdgroup_is_over_that_half(compiler: build.Compiler) -> None:
    name = "a sum over half of a simdgroup before a barrier"
    text = executor.Text(SOUND[name])
    outputs, _ = executor.examine(launch_of("sound"), compiler, text=text, part=PART)
    numbers = np.arange(128, dtype=np.float32).reshape(4, 2, 16)
    numbers[:, 0] = numbers[:, :1].sum(axis=2)
    assert np.array(outputs[0]).tolist() == numbers.ravel().tolist()
