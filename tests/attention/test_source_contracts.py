"""Figures that the system this package re-creates pins, pinned here as well.

docs/source_contracts.md says for each contract which test shows it, or why ours differs.
"""

from __future__ import annotations

import inspect

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache.attention import AttendSpec
from mlx_kvcache.control.op import update_and_attend
from mlx_kvcache.errors import CapacityError, PositionError, RewindError
from mlx_kvcache.facts.geometry import LayerPolicy
from mlx_kvcache.layout import FlatLayout, RingLayout, SequenceLayout
from mlx_kvcache.layout.runs import Run, wrap
from tests.support.op_driver import Layer, make_cache, step_rows


def test_the_op_has_no_causal_flag_and_changes_no_argument() -> None:
    names = set(inspect.signature(update_and_attend).parameters)
    assert not {name for name in names if "causal" in name or "mask" in name}
    layer = Layer(window=3, group=2)
    rows = step_rows(layer, np.random.default_rng(0), 2, 5)
    positions = mx.arange(5)
    before = [np.array(array).copy() for array in (*rows, positions)]
    answer = update_and_attend(*rows, positions, 0, 1.0, cache=make_cache([layer]))
    assert answer.shape == (2, 2, 5, layer.value_dim)
    after = [np.array(array) for array in (*rows, positions)]
    for old, new in zip(before, after, strict=True):
        assert (old == new).all()


@pytest.mark.parametrize(("position", "tokens"), [(0, 1), (0, 9), (7, 1), (7, 4)])
def test_flat_writes_the_step_and_reads_everything(position: int, tokens: int) -> None:
    plan = FlatLayout().plan(position, tokens)
    assert plan.write == (Run(position, tokens),)
    assert plan.read == (Run(0, position + tokens),)
    assert plan.read_position == 0
    assert FlatLayout().rewind_floor(1000) == 0


@pytest.mark.parametrize("window", range(1, 6))
@pytest.mark.parametrize("spare", range(1, 6))
def test_ring_plans_up_to_its_spare_rows(window: int, spare: int) -> None:
    ring = RingLayout(window, spare)
    size = window + spare - 1
    assert ring.size == size
    for position in range(3 * size):
        for tokens in range(1, spare + 1):
            plan = ring.plan(position, tokens)
            first = max(0, position - window + 1)
            assert plan.write == wrap(position, tokens, size)
            assert plan.read == wrap(first, position + tokens - first, size)
            assert plan.read_position == first
            assert sum(run.length for run in plan.read) <= window + tokens - 1
            for runs in (plan.write, plan.read):
                assert 1 <= len(runs) <= 2
                assert all(run.start >= 0 and run.start + run.length <= size for run in runs)


def test_a_step_larger_than_the_spare_rows_is_answered_and_not_refused() -> None:
    layer = Layer(window=3)
    chunked, whole = make_cache([layer], spare=2), make_cache([layer], spare=20)
    rows = step_rows(layer, np.random.default_rng(0), 1, 11)
    one = update_and_attend(*rows, 0, 0, 1.0, cache=chunked)
    other = update_and_attend(*rows, 0, 0, 1.0, cache=whole)
    assert np.allclose(np.array(one), np.array(other), atol=1e-6)
    assert (chunked.layers[0].rows, whole.layers[0].rows) == (4, 22)


def sequence(*windows: int, length: int, spare: int, capacity: int = 40) -> SequenceLayout:
    policies = [LayerPolicy.from_window(window) for window in windows]
    layout = SequenceLayout(policies, capacity, spare)
    for position in range(length):
        layout.commit(layout.plan(0, position, 1))
    return layout


def test_capacity_bounds_positions_of_rings_too() -> None:
    layout = sequence(4, length=38, spare=1)
    assert layout.can_extend(2)
    assert not layout.can_extend(3)
    with pytest.raises(CapacityError):
        layout.plan(0, 38, 3)
    layout.clear()
    assert layout.length == 0
    assert layout.can_extend(40)


def test_gaps_and_empty_steps_are_refused() -> None:
    layout = sequence(0, length=5, spare=1)
    for position, count in ((6, 1), (3, 1), (5, 0), (-1, 1)):
        with pytest.raises(PositionError):
            layout.plan(0, position, count)


@pytest.mark.parametrize(("target", "is_possible"), [(5, False), (6, True), (11, False)])
def test_the_rewinds_that_are_pinned(target: int, is_possible: bool) -> None:
    layout = sequence(0, 4, length=10, spare=4)
    if is_possible:
        layout.rewind(target)
        assert layout.length == target
        return
    with pytest.raises(RewindError):
        layout.rewind(target)
    assert layout.length == 10


@pytest.mark.parametrize("spare", [1, 3, 5])
def test_the_floor_follows_the_spare_rows_and_not_the_window(spare: int) -> None:
    layout = sequence(4, length=21, spare=spare)
    with pytest.raises(RewindError):
        layout.rewind(21 - spare - 1)
    layout.rewind(21 - spare)
    # The high water stays: a second rewind cannot go deeper than the first.
    with pytest.raises(RewindError):
        layout.rewind(21 - spare - 1)


def test_a_second_rewind_does_not_reach_overwritten_rows() -> None:
    layout = sequence(4, length=10, spare=4)
    layout.rewind(6)
    with pytest.raises(RewindError):
        layout.rewind(2)
    assert layout.length == 6


GROWTH = [
    # initial capacity, capacity, tokens of each step, rows then held
    (2, 100, [5], 8),
    (16, 20, [16, 1], 20),
    (512, 4, [1], 4),
    (0, 100, [1], 1),
    (0, 100, [3], 4),
    (2, 100, [1, 1], 2),
]


@pytest.mark.parametrize(("initial", "capacity", "steps", "rows"), GROWTH)
def test_the_growth_that_is_pinned(
    initial: int, capacity: int, steps: list[int], rows: int
) -> None:
    layer = Layer()
    cache = make_cache([layer], initial_capacity=initial, capacity=capacity)
    random, start = np.random.default_rng(0), 0
    kept = []
    for tokens in steps:
        arrays = step_rows(layer, random, 1, tokens)
        update_and_attend(*arrays, start, 0, 1.0, cache=cache)
        kept.append(arrays[1])
        start += tokens
    assert cache.layers[0].rows == rows
    held = np.array(cache.layers[0].keys)
    assert (held[:, :, :start] == np.concatenate(kept, axis=2)).all()
    assert not held[:, :, start:].any(), "rows beyond the length are zero"
    cache.rewind(0)
    assert cache.layers[0].rows == rows, "a pool never shrinks"


@pytest.mark.parametrize("held", [3, 7])
@pytest.mark.parametrize("tokens", [5, 6])
def test_a_step_over_a_window_gets_the_band_that_is_pinned(held: int, tokens: int) -> None:
    window = 4
    layer = Layer(window=window)
    # Steps beyond the spare rows are answered in logical order, as the band is written.
    cache = make_cache([layer], spare=2)
    random = np.random.default_rng(0)
    update_and_attend(*step_rows(layer, random, 1, held), 0, 0, 1.0, cache=cache)
    mask = AttendSpec.from_mask(cache.layers[0].mask_at(held, tokens)).mask
    keys, _ = cache.layer(0).update_and_fetch(*step_rows(layer, random, 1, tokens)[1:])
    rows = keys.shape[2]
    assert mask is not None
    assert mask.shape == (tokens, rows)
    query, row = np.arange(tokens)[:, None], np.arange(rows)[None]
    band = (row - query <= rows - tokens) & (row - query >= rows - tokens - window + 1)
    assert (np.array(mask) == band).all()
