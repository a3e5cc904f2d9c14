"""Admission, commits and refusals of a sequence layout, one rule a test."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mlx_kvcache.errors import (
    CapacityError,
    KVCacheError,
    LayerIndexError,
    PositionError,
    RewindError,
)
from mlx_kvcache.facts.geometry import LayerPolicy
from mlx_kvcache.layout import FlatLayout, RingLayout, SequenceLayout

FLAT = LayerPolicy.flat()
RING = LayerPolicy.ring(4)


def layout(*policies: LayerPolicy, capacity: int = 50, spare: int = 3) -> SequenceLayout:
    return SequenceLayout(policies or (FLAT, RING), capacity, spare)


def append(sequence: SequenceLayout, position: int, count: int) -> None:
    """A step that every layer has written."""
    sequence.begin(position, count)
    sequence.unwritten = 0


def test_layers_of_one_policy_share_a_layout() -> None:
    sequence = layout(FLAT, RING, FLAT, LayerPolicy.ring(4))
    assert sequence.layers[0] is sequence.layers[2]
    assert sequence.layers[1] is sequence.layers[3]
    assert [type(each) for each in sequence.layers] == [FlatLayout, RingLayout] * 2


def test_windows_and_spare_rows_beyond_the_capacity_are_not_kept() -> None:
    ring = layout(LayerPolicy.ring(10**6), capacity=20, spare=10**6).layers[0]
    assert (ring.window, ring.spare) == (20, 20)


def test_a_sequence_that_fits_its_ring_can_go_anywhere() -> None:
    for capacity, window, spare in itertools.product(range(1, 8), range(1, 12), range(1, 12)):
        sequence = layout(LayerPolicy.ring(window), capacity=capacity, spare=spare)
        append(sequence, 0, capacity)
        ring = sequence.layers[0]
        if window >= capacity:
            assert sequence.rewind_floor == 0
        assert ring.size >= min(window, capacity)


def test_committing_again_is_the_same_as_committing_once() -> None:
    once, often = layout(), layout()
    for position, count in ((0, 5), (5, 1), (6, 9)):
        once.commit(once.plan(0, position, count))
        for _ in range(3):
            for layer in (0, 1):
                often.commit(often.plan(layer, position, count))
        assert (once.length, once.high_water) == (often.length, often.high_water)
        assert once.length == position + count


def test_the_running_step_may_be_asked_for_again_and_no_other() -> None:
    sequence = layout()
    append(sequence, 0, 4)
    append(sequence, 4, 3)
    assert sequence.plan(1, 4, 3).position == 4
    for position, count in ((4, 2), (4, 4), (5, 2), (0, 4), (0, 7), (3, 1), (8, 1)):
        with pytest.raises(PositionError, match="7"):
            sequence.plan(1, position, count)
    assert (sequence.length, sequence.high_water) == (7, 7)


def test_a_rewind_ends_the_running_step() -> None:
    sequence = layout()
    append(sequence, 0, 4)
    append(sequence, 4, 3)
    sequence.rewind(5)
    for position, count in ((4, 1), (4, 3)):
        with pytest.raises(PositionError, match="5"):
            sequence.plan(0, position, count)
    assert sequence.plan(0, 5, 2).position == 5


def test_a_full_sequence_still_answers_its_running_step() -> None:
    sequence = layout(capacity=7)
    append(sequence, 0, 7)
    assert sequence.plan(1, 0, 7).joined
    assert not sequence.can_extend()
    with pytest.raises(CapacityError, match="capacity"):
        sequence.plan(0, 7, 1)


@pytest.mark.parametrize("count", [0, -1, -5])
def test_an_append_of_no_tokens_is_refused_as_a_plan_is(count: int) -> None:
    sequence = layout()
    append(sequence, 0, 3)
    with pytest.raises(PositionError, match="at least one"):
        sequence.plan(0, 3, count)
    with pytest.raises(PositionError, match="at least one"):
        append(sequence, 3, count)
    # The step that is running is still running.
    assert sequence.plan(1, 0, 3).tokens == 3


def test_a_plan_from_before_a_rewind_cannot_be_committed() -> None:
    """Its rows would stand behind a gap, or over others that were planned since."""
    sequence = layout()
    append(sequence, 0, 8)
    stale = sequence.plan(0, 8, 3)
    sequence.rewind(6)
    with pytest.raises(PositionError):
        sequence.commit(stale)
    assert (sequence.length, sequence.high_water) == (6, 8)


def test_rewinding_to_zero_is_always_possible_and_forgets_the_high_water() -> None:
    for length in range(40):
        sequence = layout(LayerPolicy.ring(4), spare=2)
        if length:
            append(sequence, 0, length)
        sequence.rewind(0)
        assert (sequence.length, sequence.high_water, sequence.rewind_floor) == (0, 0, 0)


def test_the_floor_is_that_of_the_strictest_layer() -> None:
    sequence = layout(FLAT, LayerPolicy.ring(1), LayerPolicy.ring(6), LayerPolicy.ring(2))
    append(sequence, 0, 5)
    # The ring of window 2 has 4 slots and has wrapped; that of window 6 has not.
    assert sequence.rewind_floor == 2
    append(sequence, 5, 20)
    assert sequence.rewind_floor == 22
    with pytest.raises(RewindError, match="22"):
        sequence.rewind(21)
    sequence.rewind(22)
    # The high water stays, so the floor does.
    assert (sequence.rewind_floor, sequence.length, sequence.high_water) == (22, 22, 25)


def test_check_rewind_changes_nothing_and_says_the_same_as_rewind() -> None:
    for target in range(-2, 12):
        sequence = layout(LayerPolicy.ring(3), spare=2)
        append(sequence, 0, 10)
        answers = []
        for call in (sequence.check_rewind, sequence.rewind):
            try:
                call(target)
                answers.append(None)
            except RewindError as error:
                answers.append(str(error))
            if call == sequence.check_rewind:
                assert (sequence.length, sequence.high_water) == (10, 10)
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("policies", "capacity", "spare"),
    [((), 10, 2), ((RING,), 0, 2), ((RING,), -3, 2), ((LayerPolicy.ring(1),), 10, 0)],
)
def test_a_layout_of_nothing_is_refused(policies, capacity: int, spare: int) -> None:
    with pytest.raises(KVCacheError):
        SequenceLayout(policies, capacity, spare)


@pytest.mark.parametrize("index", [-1, -2, 2, 100])
def test_a_layer_that_does_not_exist_is_refused(index: int) -> None:
    sequence = layout()
    with pytest.raises(LayerIndexError, match="2"):
        sequence.plan(index, 0, 1)
    assert sequence.length == 0


@pytest.mark.parametrize("position", [-1, -2, True, 1.0])
@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("layer", [0, 1])
def test_no_position_is_mistaken_for_a_step_that_runs(
    layer: int, length: int, position: Any
) -> None:
    fresh, cleared, rewound = layout(), layout(), layout()
    append(cleared, 0, 7)
    cleared.clear()
    append(rewound, 0, 7)
    rewound.rewind(0)
    for sequence in (fresh, cleared, rewound):
        if length:
            append(sequence, 0, length)
        before = (sequence.length, sequence.high_water)
        for count in (1, length + 1):
            with pytest.raises(PositionError):
                sequence.plan(layer, position, count)
        assert (sequence.length, sequence.high_water) == before
