"""cell_scatter and cell_gather: the kernel, the MLX ops and numpy give the same bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_kvcache.store import kernels
from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store import ops as kernel_ops
from tests.support.arrays import bits
from tests.support.kernel_arrays import DIMS, DTYPES, LAYOUTS, assert_same_bits, random_array

from .conftest import Runner

EXAMPLES = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def random_pool(data: st.DataObject, cells: int) -> mx.array:
    return random_array(
        data.draw(st.integers(0, 2**20)),
        (
            data.draw(st.integers(1, 2)),
            data.draw(st.integers(1, 3)),
            cells,
            data.draw(st.sampled_from(DIMS)),
        ),
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from(LAYOUTS)),
    )


@EXAMPLES
@given(data=st.data(), pool_cells=st.integers(8, 70))
def test_cell_scatter_gives_the_same_bits_everywhere(
    runner: Runner, data: st.DataObject, pool_cells: int
) -> None:
    pool = random_pool(data, pool_cells)
    chosen = data.draw(
        st.lists(st.integers(0, pool_cells - 1), min_size=8, max_size=pool_cells, unique=True)
    )
    shape = (pool.shape[0], pool.shape[1], len(chosen), pool.shape[3])
    rows = random_array(5, shape, pool.dtype, data.draw(st.sampled_from(LAYOUTS)))
    cells = mx.array(chosen, mx.int32)
    wanted = bits(pool).copy()
    wanted[:, :, chosen] = bits(rows)
    (got,) = runner.run(metal_kernels.cell_scatter(pool, rows, cells))
    assert_same_bits(got, wanted, f"kernel on {runner.name}")
    assert_same_bits(kernel_ops.cell_scatter(pool, rows, cells), wanted, "ops")


@EXAMPLES
@given(data=st.data(), pool_cells=st.integers(8, 70))
def test_cell_gather_gives_the_same_bits_everywhere(
    runner: Runner, data: st.DataObject, pool_cells: int
) -> None:
    pool = random_pool(data, pool_cells)
    chosen = data.draw(st.lists(st.integers(0, pool_cells - 1), min_size=8, max_size=90))
    cells = mx.array(chosen, mx.int32)
    rows = len(chosen) + data.draw(st.sampled_from([0, 1, 17]))
    zeros = [(0, 0), (0, 0), (0, rows - len(chosen)), (0, 0)]
    wanted = np.pad(bits(pool)[:, :, chosen], zeros)
    (got,) = runner.run(metal_kernels.cell_gather(pool, cells, rows))
    assert_same_bits(got, wanted, f"kernel on {runner.name}")
    assert_same_bits(kernel_ops.cell_gather(pool, cells, rows), wanted, "ops")


@pytest.mark.parametrize("chosen", [[0], [5, 2], [7, 0, 1, 2, 3, 4, 5]])
def test_so_few_cells_that_they_come_in_constant_memory(runner: Runner, chosen: list[int]) -> None:
    pool = random_array(1, (2, 2, 8, 16), mx.float16, "transposed")
    rows = random_array(2, (2, 2, len(chosen), 16), mx.float16, "contiguous")
    wanted = bits(pool).copy()
    wanted[:, :, chosen] = bits(rows)
    (scattered,) = runner.run(metal_kernels.cell_scatter(pool, rows, mx.array(chosen)))
    assert_same_bits(scattered, wanted, "scatter")
    (gathered,) = runner.run(metal_kernels.cell_gather(scattered, mx.array(chosen)))
    assert_same_bits(gathered, rows, "gather")


def test_a_strided_list_of_cells(runner: Runner) -> None:
    pool = random_array(1, (1, 2, 20, 16), mx.float32, "contiguous")
    rows = random_array(2, (1, 2, 9, 16), mx.float32, "contiguous")
    cells = mx.array(list(range(18)), mx.int32)[::-2]
    mx.eval(cells)
    wanted = bits(pool).copy()
    wanted[:, :, range(17, 0, -2)] = bits(rows)
    assert_same_bits(
        runner.run(metal_kernels.cell_scatter(pool, rows, cells))[0], wanted, "scatter"
    )
    gathered = runner.run(metal_kernels.cell_gather(pool, cells))[0]
    assert_same_bits(gathered, bits(pool)[:, :, range(17, 0, -2)], "gather")


def test_a_cell_outside_the_pool_touches_nothing_and_the_last_row_of_a_cell_stays(
    runner: Runner,
) -> None:
    pool = random_array(1, (1, 1, 12, 16), mx.float16, "contiguous")
    rows = random_array(2, (1, 1, 9, 16), mx.float16, "contiguous")
    cells = mx.array([3, 12, -1, 3, 100, -(2**31), 2**31 - 1, 0, 3], mx.int32)
    wanted = bits(pool).copy()
    wanted[:, :, 0], wanted[:, :, 3] = bits(rows)[:, :, 7], bits(rows)[:, :, 8]
    assert_same_bits(
        runner.run(metal_kernels.cell_scatter(pool, rows, cells))[0], wanted, "scatter"
    )
    gathered = runner.run(metal_kernels.cell_gather(pool, cells))[0]
    nearest = [3, 11, 0, 3, 11, 0, 11, 0, 3]
    assert_same_bits(gathered, bits(pool)[:, :, nearest], "gather")


def test_the_comparison_sees_two_cells_swapped(runner: Runner) -> None:
    pool = random_array(1, (1, 1, 12, 16), mx.float16, "contiguous")
    rows = random_array(2, (1, 1, 2, 16), mx.float16, "contiguous")
    (one,) = runner.run(metal_kernels.cell_scatter(pool, rows, mx.array([4, 9])))
    (other,) = runner.run(metal_kernels.cell_scatter(pool, rows, mx.array([9, 4])))
    with pytest.raises(AssertionError, match="32 elements differ"):
        assert_same_bits(one, other, "kernel")


def test_lists_of_cells_are_checked() -> None:
    pool, rows = mx.zeros((1, 1, 4, 8)), mx.ones((1, 1, 2, 8))
    got = kernels.cell_scatter(pool, rows, [3, 1])
    assert np.array(got)[0, 0, :, 0].tolist() == [0, 1, 0, 1]
    assert np.array(kernels.cell_gather(got, [0, 3, 3]))[0, 0, :, 0].tolist() == [0, 1, 1]
    assert np.array(kernels.cell_gather(got, [3], 3))[0, 0, :, 0].tolist() == [1, 0, 0]
    assert kernels.cell_gather(pool, []).shape == (1, 1, 0, 8)
    assert kernels.cell_scatter(pool, rows[:, :, :0], []) is pool
    for cells, message in (([4, 0], "outside"), ([-1, 0], "outside"), ([2, 2], "more than once")):
        with pytest.raises(kernels.PositionError, match=message):
            kernels.cell_scatter(pool, rows, cells)
    with pytest.raises(kernels.UpdateShapeError, match="as many cells"):
        kernels.cell_scatter(pool, rows, [1])
