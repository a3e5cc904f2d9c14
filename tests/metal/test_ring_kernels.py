"""ring_write and ring_join: the kernel, the MLX ops and numpy give the same bits."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_kvcache.store import kernels
from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store import ops as kernel_ops
from mlx_kvcache.store.ops import write_rows
from tests.support.arrays import bits
from tests.support.kernel_arrays import DTYPES, RingCase, assert_same_bits, ring_cases

from .conftest import Runner

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
CASE = RingCase(7, mx.bfloat16, 2, 2, 5, 3, 16, 4, "contiguous", "transposed")


def numpy_ring_write(case: RingCase) -> np.ndarray:
    """Row by row, in order: the definition."""
    ring, rows = bits(case.ring).copy(), bits(case.rows)
    for row in range(case.steps):
        ring[:, :, (case.slot + row) % case.slots] = rows[:, :, row]
    return ring


def numpy_ring_join(case: RingCase, old_count: int) -> np.ndarray:
    ring = bits(case.ring)
    slots = [(case.slot + i) % case.slots for i in range(old_count)]
    return np.concatenate([ring[:, :, slots], bits(case.rows)], axis=2)


def at_edges(test: object) -> object:
    """The steps and starts that must be tried whatever hypothesis draws, in each dtype."""
    for number, (steps, slot) in enumerate(
        (steps, slot) for steps in (1, 4, 5, 6, 15) for slot in (0, 4)
    ):
        case = dataclasses.replace(CASE, steps=steps, slot=slot, dtype=DTYPES[number % 3])
        test = example(case=case)(test)  # type: ignore[arg-type]
    return test


@EXAMPLES
@at_edges
@given(case=ring_cases())
def test_ring_write_gives_the_same_bits_everywhere(runner: Runner, case: RingCase) -> None:
    wanted = numpy_ring_write(case)
    (got,) = runner.run(metal_kernels.ring_write(case.ring, case.rows, case.slot))
    assert_same_bits(got, wanted, f"kernel on {runner.name}")
    assert_same_bits(kernel_ops.ring_write(case.ring, case.rows, case.slot), wanted, "ops")
    assert_same_bits(
        kernel_ops.ring_write(case.ring, case.rows, mx.array(case.slot)), wanted, "ops, array start"
    )


@EXAMPLES
@given(case=ring_cases(), data=st.data())
def test_ring_join_gives_the_same_bits_everywhere(
    runner: Runner, case: RingCase, data: st.DataObject
) -> None:
    old_count = data.draw(st.sampled_from([1, case.slots]) | st.integers(1, case.slots))
    wanted = numpy_ring_join(case, old_count)
    arguments = (case.ring, case.rows, case.slot, old_count)
    (got,) = runner.run(metal_kernels.ring_join(*arguments))
    assert_same_bits(got, wanted, f"kernel on {runner.name}")
    assert_same_bits(kernel_ops.ring_join(*arguments), wanted, "ops")
    as_array = (case.ring, case.rows, mx.array(case.slot), old_count)
    assert_same_bits(kernel_ops.ring_join(*as_array), wanted, "ops, array start")


def test_the_comparison_sees_one_changed_row_and_one_changed_slot(runner: Runner) -> None:
    wanted = numpy_ring_write(CASE)
    other_rows = np.array(CASE.rows.astype(mx.float32))
    other_rows[0, 1, 2, 15] += 1
    changed = mx.array(other_rows).astype(CASE.dtype)
    for rows, slot in ((changed, CASE.slot), (CASE.rows, CASE.slot - 1)):
        (got,) = runner.run(metal_kernels.ring_write(CASE.ring, rows, slot))
        with pytest.raises(AssertionError, match="elements differ"):
            assert_same_bits(got, wanted, "kernel")


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("dim", [1, 3])
def test_arrays_so_small_that_they_come_in_constant_memory(
    runner: Runner, slots: int, dim: int
) -> None:
    case = dataclasses.replace(CASE, batch=1, heads=1, slots=slots, steps=1, dim=dim, slot=0)
    assert max(case.ring.size, case.rows.size) < 8
    (written,) = runner.run(metal_kernels.ring_write(case.ring, case.rows, case.slot))
    assert_same_bits(written, numpy_ring_write(case), "ring_write")
    (joined,) = runner.run(metal_kernels.ring_join(case.ring, case.rows, 0, slots))
    assert_same_bits(joined, numpy_ring_join(case, slots), "ring_join")


def test_a_wide_pack_out_of_constant_memory(runner: Runner) -> None:
    case = dataclasses.replace(
        CASE, dtype=mx.float32, batch=1, heads=1, slots=1, steps=1, dim=4, slot=0
    )
    launch = metal_kernels.ring_write(case.ring, case.rows, 0)
    assert dict(launch.template)["PACK"] == 4
    assert case.rows.size < 8
    assert_same_bits(runner.run(launch)[0], numpy_ring_write(case), "kernel")


def test_a_start_outside_the_ring_is_taken_modulo_its_size(runner: Runner) -> None:
    for start in (-1, -6, 9, 2**31 - 1):
        case = dataclasses.replace(CASE, slot=start % CASE.slots)
        (got,) = runner.run(metal_kernels.ring_write(case.ring, case.rows, mx.array(start)))
        assert_same_bits(got, numpy_ring_write(case), f"start {start}")
        (got,) = runner.run(metal_kernels.ring_join(case.ring, case.rows, mx.array(start), 4))
        assert_same_bits(got, numpy_ring_join(case, 4), f"first slot {start}")


def test_every_bit_pattern_survives_a_move(runner: Runner) -> None:
    """Also NaNs with a payload, infinities, subnormals and both zeros."""
    patterns = mx.arange(2**16, dtype=mx.uint32).astype(mx.uint16).reshape(1, 1, -1, 64)
    for dtype in (mx.float16, mx.bfloat16):
        ring = mx.zeros((1, 1, 1024, 64), dtype)
        (got,) = runner.run(metal_kernels.ring_write(ring, patterns.view(dtype), 0))
        assert_same_bits(got, bits(patterns), str(dtype))


def test_no_rows_leave_the_ring_as_it_is() -> None:
    ring, none = CASE.ring, CASE.rows[:, :, :0]
    assert kernels.ring_write(ring, none, 3) is ring
    joined = kernels.ring_join(ring, none, 3, 4)
    assert_same_bits(joined, bits(ring)[:, :, [3, 4, 0, 1]], "join of old rows alone")
    assert_same_bits(kernels.ring_join(ring, CASE.rows, 3, 0), CASE.rows, "join of new rows alone")


def test_both_forms_of_a_placed_run_agree_and_leave_the_ring_alone() -> None:
    ring, piece = CASE.ring, CASE.rows
    before = bits(ring).copy()
    wanted = before.copy()
    wanted[:, :, 1:4] = bits(piece)
    assert_same_bits(write_rows(ring, piece, 1), wanted, "integer start")
    assert_same_bits(write_rows(ring, piece, mx.array([1])), wanted, "array start")
    assert_same_bits(ring, before, "the ring that was passed")


@pytest.mark.parametrize("steps", [1, 3])
def test_a_compiled_step_with_an_array_start_is_traced_once(steps: int) -> None:
    traces = []
    case = dataclasses.replace(CASE, steps=steps)
    rows = case.rows

    def step(ring: mx.array, slot: mx.array) -> mx.array:
        traces.append(1)
        return kernel_ops.ring_write(ring, rows, slot)

    compiled = mx.compile(step)
    for slot in (0, 3, 4):
        wanted = numpy_ring_write(dataclasses.replace(case, slot=slot))
        assert_same_bits(compiled(case.ring, mx.array(slot)), wanted, f"slot {slot}")
    assert len(traces) == 1
