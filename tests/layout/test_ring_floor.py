"""The rewind floor of a ring, against every history of writes and rewinds that is small."""

from __future__ import annotations

import itertools

import pytest

from mlx_kvcache.layout import FlatLayout, RingLayout
from tests.support.slots_model import SlotLayer

SMALL = range(1, 9)


def written(window: int, spare: int, steps: list[tuple[int, int]]) -> SlotLayer:
    """The slots after steps (position, count), each carried out as the layout planned it."""
    slots = SlotLayer(window, 10_000, spare)
    layout = RingLayout(window, spare)
    for position, count in steps:
        slots.carry_out(layout.plan(position, count), position, count)
    return slots


def reachable(slots: SlotLayer, length: int) -> set[int]:
    return {position for position in range(1, length + 1) if slots.finds_window(position)}


def predicted(window: int, spare: int, high_water: int, length: int) -> set[int]:
    floor = RingLayout(window, spare).rewind_floor(high_water)
    return {position for position in range(1, length + 1) if position >= floor}


@pytest.mark.slow
@pytest.mark.parametrize("window", SMALL)
@pytest.mark.parametrize("spare", SMALL)
def test_floor_after_writes_of_any_size(window: int, spare: int) -> None:
    for chunk in (1, 2, 3, spare, spare + 1, 40):
        for length in range(1, 41):
            starts = range(0, length, chunk)
            steps = [(start, min(chunk, length - start)) for start in starts]
            slots = written(window, spare, steps)
            assert reachable(slots, length) == predicted(window, spare, length, length)


@pytest.mark.slow
@pytest.mark.parametrize("window", SMALL)
@pytest.mark.parametrize("spare", SMALL)
def test_floor_after_an_earlier_rewind(window: int, spare: int) -> None:
    for high, back, again in itertools.product((3, 9, 16, 25, 40), range(1, 9), range(12)):
        target = high - back
        if target < 1 or target < RingLayout(window, spare).rewind_floor(high):
            continue
        steps = [(start, 1) for start in range(high)]
        steps += [(start, 1) for start in range(target, target + again)]
        slots = written(window, spare, steps)
        length, high_water = target + again, max(high, target + again)
        assert reachable(slots, length) == predicted(window, spare, high_water, length)


def test_the_floor_is_neither_the_length_nor_the_window_rule() -> None:
    """A case in which `length - window` would hand out an overwritten row."""
    slots = written(8, 2, [(start, 1) for start in range(30)])
    assert not slots.finds_window(30 - 8)
    assert RingLayout(8, 2).rewind_floor(30) == 28


@pytest.mark.parametrize("high_water", [0, 1, 40, 2**31 - 1])
def test_a_flat_layer_and_a_window_of_one_reach_everything(high_water: int) -> None:
    assert FlatLayout().rewind_floor(high_water) == 0
    assert RingLayout(1, 3).rewind_floor(high_water) == 0


@pytest.mark.parametrize("window", SMALL)
@pytest.mark.parametrize("spare", SMALL)
def test_steps_of_every_size_at_every_position(window: int, spare: int) -> None:
    """Every step up to 3 rings long, at every position of a filled ring."""
    layout = RingLayout(window, spare)
    size = layout.size
    for position in range(2 * size + 2):
        for count in range(1, 3 * size + 1):
            slots = SlotLayer(window, 10_000, spare)
            for old in range(position):
                slots.slots[old % size] = old
            plan = layout.plan(position, count)
            slots.carry_out(plan, position, count)
            # Up to `spare` tokens, nothing needs to be joined.
            if count <= spare:
                assert not plan.joined
