"""The host's half and bfloat are MLX's, bit for bit; its simdgroup functions are numpy's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.store.metal import Kernel, Launch
from tests.support.kernel_arrays import assert_same_bits

from .host import build, executor

NARROW = (mx.float16, mx.bfloat16)


def map_launch(
    array: mx.array, out: mx.Dtype, template: tuple[tuple[str, mx.Dtype], ...]
) -> Launch:
    size = array.size
    return Launch(
        Kernel("inline.metal", ("x",), ("out",)),
        "inline",
        (array,),
        template,
        (size, 1, 1),
        (min(size, 256), 1, 1),
        ((size,),),
        (out,),
    )


def run_body(body: str, launch: Launch, compiler: build.Compiler) -> mx.array:
    outputs, findings = executor.examine(launch, compiler, text=executor.Text(body), seeds=(0, 2))
    assert findings == ()
    return outputs[0]


def interesting_floats() -> np.ndarray:
    """Around every rounding boundary of both types, and random bit patterns."""
    exponents = np.arange(0, 256, dtype=np.uint32) << 23
    fractions = np.array(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0x17FFF,
         0x18000, 0x18001, 0x7FEFFF, 0x7FF000, 0x7FFFFF],
        np.uint32,
    )  # fmt: skip
    grid = (exponents[:, None] | fractions).reshape(-1)
    noise = np.random.default_rng(0).integers(0, 2**32, 20000, np.uint64).astype(np.uint32)
    both = np.concatenate([grid, grid | 0x80000000, noise]).view(np.float32)
    return both[~np.isnan(both)]


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_rounds_as_mlx_does(compiler: build.Compiler, dtype: mx.Dtype) -> None:
    values = mx.array(interesting_floats())
    launch = map_launch(values, dtype, (("T", dtype),))
    body = "const uint i = thread_position_in_grid.x;\nout[i] = static_cast<T>(x[i]);"
    assert_same_bits(run_body(body, launch, compiler), values.astype(dtype), str(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_is_exact(compiler: build.Compiler, dtype: mx.Dtype) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    values = mx.array(patterns).view(dtype)
    values = mx.array(patterns[~np.array(mx.isnan(values))]).view(dtype)
    launch = map_launch(values, mx.float32, (("T", dtype),))
    body = "const uint i = thread_position_in_grid.x;\nout[i] = float(x[i]);"
    assert_same_bits(run_body(body, launch, compiler), values.astype(mx.float32), str(dtype))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("operator", ["+", "-", "*", "/"])
def test_narrow_arithmetic_is_mlx_s(
    compiler: build.Compiler, operator: str, dtype: mx.Dtype
) -> None:
    size = 20000
    bits = np.random.default_rng(1).integers(0, 2**16, size).astype(np.uint16)
    values = mx.array(bits).view(dtype)
    values = mx.where(mx.isfinite(values), values, mx.array(1.5, dtype))
    mx.eval(values)
    other = values[::-1]
    wanted = {"+": values + other, "-": values - other, "*": values * other, "/": values / other}
    launch = map_launch(values, dtype, (("T", dtype),))
    body = f"const uint i = thread_position_in_grid.x;\nout[i] = x[i] {operator} x[{size - 1} - i];"
    got = run_body(body, launch, compiler)
    number = ~np.array(mx.isnan(wanted[operator]))
    assert number.sum() > size // 2
    kept = mx.array(np.flatnonzero(number))
    assert_same_bits(got[kept], wanted[operator][kept], f"{dtype} {operator}")


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("simd_sum(v)", lambda lanes: np.repeat(lanes.sum(1), 32)),
        ("simd_max(v)", lambda lanes: np.repeat(lanes.max(1), 32)),
        ("simd_min(v)", lambda lanes: np.repeat(lanes.min(1), 32)),
        ("simd_broadcast(v, 5)", lambda lanes: np.repeat(lanes[:, 5], 32)),
        ("simd_shuffle(v, 31 - lane)", lambda lanes: lanes[:, ::-1].ravel()),
        ("simd_shuffle_xor(v, 9)", lambda lanes: lanes[:, np.arange(32) ^ 9].ravel()),
        (
            "simd_shuffle_down(v, 3)",
            lambda lanes: lanes[:, np.r_[3:32, 29:32]].ravel(),
        ),
        ("simd_shuffle_up(v, 3)", lambda lanes: lanes[:, np.r_[0:3, 0:29]].ravel()),
        ("simd_prefix_inclusive_sum(v)", lambda lanes: lanes.cumsum(1).ravel()),
        ("simd_prefix_exclusive_sum(v)", lambda lanes: (lanes.cumsum(1) - lanes).ravel()),
    ],
)
def test_simdgroup_functions(compiler: build.Compiler, call: str, wanted: object) -> None:
    values = np.random.default_rng(2).integers(-1000, 1000, 128).astype(np.int32)
    launch = map_launch(mx.array(values), mx.int32, ())
    body = (
        "const uint i = thread_position_in_grid.x;\n"
        "const uint lane = thread_index_in_simdgroup;\n"
        f"const int v = x[i];\nout[i] = {call};"
        + ("" if "lane" in call else " // lane is not needed here")
    )
    got = np.array(run_body(body, launch, compiler))
    assert got.tolist() == wanted(values.reshape(-1, 32)).tolist()  # type: ignore[operator]


def test_a_group_that_really_meets_sums_across_simdgroups(compiler: build.Compiler) -> None:
    """Threadgroup memory, a barrier, two levels of reduction, as in attention kernels."""
    values = np.random.default_rng(3).integers(-1000, 1000, 600).astype(np.int32)
    launch = map_launch(mx.array(values), mx.int32, ())
    body = """
threadgroup int partial[8];
const uint i = thread_position_in_grid.x;
const int total = simd_sum(x[i]);
if (thread_index_in_simdgroup == 0) {
  partial[simdgroup_index_in_threadgroup] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
int sum = 0;
for (uint s = 0; s < simdgroups_per_threadgroup; ++s) {
  sum += partial[s];
}
out[i] = sum;
"""
    got = np.array(run_body(body, launch, compiler))
    groups = [values[first : first + 256] for first in range(0, 600, 256)]
    assert got.tolist() == [int(group.sum()) for group in groups for _ in group]
