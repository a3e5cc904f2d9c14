"""ring_write_quantized: words, scales and biases as mx.quantize gives them, bit for bit.

MLX rounds in one way on its CPU and in another on its GPU; the kernel knows both. The CPU's is
compared with mx.quantize itself, wherever the test runs. The GPU's is compared with a numpy
transcription of MLX's Metal source, and with mx.quantize where there is a Metal GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_kvcache.store import kernels
from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store import ops as kernel_ops
from tests.support.arrays import bits
from tests.support.kernel_arrays import DTYPES, LAYOUTS, assert_same_bits, laid_out, random_array

from .conftest import Runner

Quantized = tuple[mx.array, mx.array, mx.array]
NAMES = ("words", "scales", "biases")
FORMATS = [(group, bits_) for group in (32, 64, 128) for bits_ in (4, 8)]
RING_LAYOUTS = ("contiguous", "transposed", "reversed", "mirrored", "spaced")
EXAMPLES = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@dataclass(frozen=True)
class Step:
    """Rows of a step into a quantized ring."""

    seed: int
    slots: int
    steps: int
    slot: int
    layout: str
    ring_layout: str


def step_cases() -> st.SearchStrategy[Step]:
    return st.integers(1, 7).flatmap(
        lambda slots: st.builds(
            Step,
            seed=st.integers(0, 2**20),
            slots=st.just(slots),
            steps=st.sampled_from([1, max(1, slots - 1), slots, slots + 1, 3 * slots]),
            slot=st.sampled_from([0, slots - 1]) | st.integers(0, slots - 1),
            layout=st.sampled_from(LAYOUTS),
            ring_layout=st.sampled_from(RING_LAYOUTS),
        )
    )


def rows_of(step: Step, dtype: mx.Dtype, dim: int) -> mx.array:
    """Rows of many scales and offsets: groups of one sign, of both, tiny ones, and all zero."""
    rows = random_array(step.seed, (2, 2, step.steps, dim), dtype, step.layout)
    generator = np.random.default_rng(step.seed)
    scale = generator.choice([0.0, 1e-6, 1e-3, 1.0, 300.0], (step.steps, 1))
    shift = generator.choice([-3.0, 0.0, 0.0, 3.0], (step.steps, 1)) * scale
    return (rows * mx.array(scale).astype(dtype) + mx.array(shift).astype(dtype)).astype(dtype)


def tie_rows(dtype: mx.Dtype, dim: int) -> mx.array:
    """Half steps from 0 to 15: quantized to 4 bits with a scale of one, every other is a tie."""
    values = np.minimum(np.arange(0, 16, 0.5, dtype=np.float32), 15)
    return mx.array(np.tile(values, (1, 1, 2, dim // 32))).astype(dtype)


def quantized_ring(step: Step, dim: int, dtype: mx.Dtype, form: tuple[int, int]) -> Quantized:
    """A ring whose three arrays lie in memory as the step says, each in another way."""
    old = random_array(step.seed + 9, (2, 2, step.slots, dim), dtype, "contiguous")
    first = RING_LAYOUTS.index(step.ring_layout)
    layouts = [RING_LAYOUTS[(first + i) % len(RING_LAYOUTS)] for i in range(3)]
    parts = mx.quantize(old, group_size=form[0], bits=form[1])
    words, scales, biases = (laid_out(a, b) for a, b in zip(parts, layouts, strict=True))
    return words, scales, biases


def numpy_write(ring: Quantized, new: Quantized, slot: int) -> list[np.ndarray]:
    written = [bits(array).copy() for array in ring]
    for target, source in zip(written, (bits(array) for array in new), strict=True):
        for row in range(source.shape[2]):
            target[:, :, (slot + row) % target.shape[2]] = source[:, :, row]
    return written


def gpu_rule(rows: mx.array, group: int, bits_: int) -> Quantized:
    """mx.quantize as MLX's Metal kernel computes it: ties away from zero, a maximum of >= 0."""
    values = np.array(rows.astype(mx.float32)).reshape(-1, group)
    top = np.float32(2**bits_ - 1)

    def nearest(x: np.ndarray) -> np.ndarray:
        return np.trunc(x) + (np.abs(x - np.trunc(x)) >= 0.5) * np.sign(x)

    low, high = values.min(1), np.maximum(values.max(1), np.float32(0))
    step = np.maximum((high - low) / top, np.float32(1e-7))
    low_is_edge = np.abs(low) > np.abs(high)
    edge = np.where(low_is_edge, low, high)
    scale = np.where(low_is_edge, step, -step)
    count = nearest(edge / scale).astype(np.float32)
    moves = count != 0
    scale = np.where(moves, edge / np.where(moves, count, np.float32(1)), scale)
    bias = np.where(moves, edge, np.float32(0))
    levels = np.clip(nearest((values - bias[:, None]) / scale[:, None]), 0, top).astype(np.uint32)
    per_word = 32 // bits_
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits_)
    words = np.bitwise_or.reduce(levels.reshape(-1, per_word) << shifts, axis=1)
    lead = rows.shape[:3]
    return (
        mx.array(words).reshape(*lead, -1),
        mx.array(scale).astype(rows.dtype).reshape(*lead, -1),
        mx.array(bias).astype(rows.dtype).reshape(*lead, -1),
    )


def check(
    runner: Runner, ring: Quantized, rows: mx.array, slot: int, new: Quantized, cpu: bool
) -> None:
    launch = metal_kernels.ring_write_quantized(*ring, rows, slot, cpu_rule=cpu)
    got = runner.run(launch)
    wanted = numpy_write(ring, new, slot)
    for name, array, expected in zip(NAMES, got, wanted, strict=True):
        assert_same_bits(array, expected, f"{name} on {runner.name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"group{form[0]}-bits{form[1]}")
@EXAMPLES
@given(step=step_cases())
def test_the_cpu_rule_is_that_of_mx_quantize(
    runner: Runner, form: tuple[int, int], dtype: mx.Dtype, step: Step
) -> None:
    dim = 256 if form[0] == 128 else 96 if form[0] == 32 else 64
    rows = rows_of(step, dtype, dim)
    ring = quantized_ring(step, dim, dtype, form)
    new = mx.quantize(rows, group_size=form[0], bits=form[1], stream=mx.cpu)
    check(runner, ring, rows, step.slot, new, cpu=True)
    written = kernel_ops.ring_write_quantized(
        *ring, rows, step.slot, group_size=form[0], bits=form[1]
    )
    if mx.default_device() == mx.Device(mx.cpu):
        for name, array, expected in zip(
            NAMES, written, numpy_write(ring, new, step.slot), strict=True
        ):
            assert_same_bits(array, expected, f"{name} by ops")


@pytest.mark.parametrize(
    ("dtype", "form"), [(mx.bfloat16, (64, 4)), (mx.float32, (32, 8)), (mx.float16, (128, 8))]
)
@EXAMPLES
@given(step=step_cases())
def test_the_gpu_rule_is_that_of_mlx_on_metal(
    runner: Runner, form: tuple[int, int], dtype: mx.Dtype, step: Step
) -> None:
    dim = max(64, form[0])
    rows = rows_of(step, dtype, dim)
    ring = quantized_ring(step, dim, dtype, form)
    new = gpu_rule(rows, *form)
    check(runner, ring, rows, step.slot, new, cpu=False)
    if mx.metal.is_available():
        on_gpu = mx.quantize(rows, group_size=form[0], bits=form[1], stream=mx.gpu)
        for name, array, expected in zip(NAMES, on_gpu, new, strict=True):
            assert_same_bits(array, expected, f"{name} of mx.quantize on the GPU")


def test_the_two_rules_differ_on_ties_and_on_negative_groups(runner: Runner) -> None:
    """Otherwise neither test above would tell one rule from the other."""
    ties = tie_rows(mx.float32, 64)
    negative = -1 - mx.abs(random_array(3, (1, 1, 2, 64), mx.float32, "contiguous"))
    for rows in (ties, negative):
        ring = mx.quantize(mx.zeros((1, 1, 2, 64)), group_size=32, bits=4)
        by_cpu = mx.quantize(rows, group_size=32, bits=4, stream=mx.cpu)
        by_gpu = gpu_rule(rows, 32, 4)
        assert not mx.array_equal(by_cpu[0], by_gpu[0])
        check(runner, ring, rows, 0, by_cpu, cpu=True)
        check(runner, ring, rows, 0, by_gpu, cpu=False)


def test_one_changed_input_changes_one_group(runner: Runner) -> None:
    rows = random_array(1, (1, 1, 2, 64), mx.float32, "contiguous")
    ring = mx.quantize(mx.zeros((1, 1, 3, 64)), group_size=32, bits=8)
    changed = mx.array(np.array(rows) * 1.0)
    changed[0, 0, 1, 40] = 9.0
    first = runner.run(metal_kernels.ring_write_quantized(*ring, rows, 2))
    second = runner.run(metal_kernels.ring_write_quantized(*ring, changed, 2))
    differing = np.argwhere(bits(first[0]) != bits(second[0]))
    assert set(map(tuple, differing)) <= {(0, 0, 0, word) for word in range(8, 16)}
    assert np.argwhere(bits(first[1]) != bits(second[1])).tolist() == [[0, 0, 0, 1]]


def test_the_public_function_refuses_what_is_no_quantized_ring() -> None:
    rows = mx.zeros((1, 2, 3, 64))
    words, scales, biases = mx.quantize(mx.zeros((1, 2, 8, 64)), group_size=32, bits=4)
    kernels.ring_write_quantized(words, scales, biases, rows, 7)
    with pytest.raises(kernels.UpdateShapeError, match="no quantized ring"):
        kernels.ring_write_quantized(words, scales, biases[:, :, :4], rows, 0)
    two_bits = mx.quantize(mx.zeros((1, 2, 8, 64)), group_size=32, bits=2)
    with pytest.raises(kernels.UpdateShapeError, match="bits one of"):
        kernels.ring_write_quantized(*two_bits, rows, 0)
    with pytest.raises(kernels.UpdateDtypeError, match="cast the rows"):
        kernels.ring_write_quantized(words, scales, biases, rows.astype(mx.float16), 0)
    with pytest.raises(kernels.PositionError, match="slot of the ring of 8"):
        kernels.ring_write_quantized(words, scales, biases, rows, 8)
