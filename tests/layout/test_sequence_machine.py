"""Any sequence of steps, rewinds, clears and refused calls, against the brute-force slots."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_kvcache.errors import CapacityError, LayerIndexError, PositionError, RewindError
from mlx_kvcache.layout import RingLayout, SequenceLayout, runs
from mlx_kvcache.layout import ring as ring_module
from tests.support.slots_model import SlotSequence

WINDOWS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


class SequenceMachine(RuleBasedStateMachine):
    """Drives one sequence; `SlotSequence` asserts."""

    @initialize(
        windows=WINDOWS,
        spare=st.integers(1, 9),
        capacity=st.one_of(st.integers(1, 25), st.integers(40, 120)),
    )
    def begin(self, windows: list[int], spare: int, capacity: int) -> None:
        self.sequence = SlotSequence(windows, capacity, spare)
        largest = max((layer.size for layer in self.sequence.layers if layer.window), default=4)
        self.largest_step = 3 * largest

    def _count(self, data: st.DataObject) -> int:
        return data.draw(st.integers(1, min(self.largest_step, self.sequence.room)), "tokens")

    @precondition(lambda self: self.sequence.room > 0)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        count = self._count(data)
        layers = range(len(self.sequence.layers))
        order = data.draw(st.permutations(layers), "order")
        commits = data.draw(st.sets(st.sampled_from(layers)), "commits")
        self.sequence.step(count, order, commits)

    @precondition(lambda self: self.sequence.room > 0)
    @rule(repeat=st.integers(1, 6))
    def decode(self, repeat: int) -> None:
        for _ in range(min(repeat, self.sequence.room)):
            self.sequence.step(1, range(len(self.sequence.layers)), ())

    @precondition(lambda self: self.sequence.room > 0)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.sequence.append(self._count(data))

    @rule(data=st.data())
    def rewind_near(self, data: st.DataObject) -> None:
        length = self.sequence.length
        self.sequence.rewind(data.draw(st.integers(max(0, length - 10), length), "position"))

    @rule(data=st.data())
    def rewind_anywhere(self, data: st.DataObject) -> None:
        self.sequence.rewind(data.draw(st.integers(-1, self.sequence.length + 1), "position"))

    @rule()
    def clear(self) -> None:
        self.sequence.clear()

    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        sequence, layout = self.sequence, self.sequence.layout
        length, room = sequence.length, sequence.room
        before = sequence.observe()
        layer = data.draw(st.integers(0, len(sequence.layers) - 1), "layer")
        with pytest.raises(CapacityError, match=str(sequence.capacity)):
            layout.plan(layer, length, room + data.draw(st.integers(1, 50), "excess"))
        with pytest.raises(CapacityError):
            layout.begin(length, room + 1)
        for gap in (1, 7):
            with pytest.raises(PositionError, match=str(length)):
                layout.plan(layer, length + gap, 1)
            with pytest.raises(PositionError):
                layout.begin(length + gap, 1)
        for count in (0, -1):
            with pytest.raises(PositionError):
                layout.plan(layer, length, count)
        for index in (-1, len(sequence.layers), len(sequence.layers) + 5):
            with pytest.raises(LayerIndexError, match=str(len(sequence.layers))):
                layout.plan(index, length, 1)
        for position in (True, 1.0, "1", None):
            with pytest.raises(RewindError):
                layout.rewind(position)
        assert sequence.observe() == before

    @invariant()
    def every_target_is_judged_right(self) -> None:
        if hasattr(self, "sequence"):
            self.sequence.check_every_target()


TestSequenceMachine = pytest.mark.slow(SequenceMachine.TestCase)
TestSequenceMachine.settings = settings(stateful_step_count=20, report_multiple_bugs=False)


def walk(seed: int, steps: int = 30) -> None:
    """A seeded walk over the same checks, for planted faults (no shrinking needed)."""
    choose = random.Random(seed)
    windows = [choose.randint(0, 9) for _ in range(choose.randint(1, 3))]
    sequence = SlotSequence(windows, choose.choice([17, 90]), choose.randint(1, 9))
    layers = range(len(windows))
    for _ in range(steps):
        if sequence.room and choose.random() < 0.7:
            count = choose.choice([1, 1, 2, 3, 5, 9, 20])
            sequence.step(min(count, sequence.room), layers, layers)
        else:
            sequence.rewind(choose.randint(max(0, sequence.length - 6), sequence.length))
        sequence.check_every_target()


def walks() -> None:
    for seed in range(12):
        walk(seed)


def test_walk_holds() -> None:
    walks()


def _floor(formula):
    return lambda self, high_water: max(0, formula(self, high_water))


def _wrap_one_late(start, length, size):
    return runs.wrap(start + 1, length, size)


def _ring_plan(change):
    original = RingLayout.plan
    return lambda self, position, count: change(original(self, position, count))


def _planted(monkeypatch, fault: str) -> None:
    if fault == "the floor is length - window":
        monkeypatch.setattr(RingLayout, "rewind_floor", _floor(lambda r, h: h - r.window))
    elif fault == "the floor is one too low":
        floor = RingLayout.rewind_floor
        monkeypatch.setattr(RingLayout, "rewind_floor", _floor(lambda r, h: floor(r, h) - 1))
    elif fault == "the floor is one too high":
        monkeypatch.setattr(
            RingLayout, "rewind_floor", _floor(lambda r, h: 0 if h <= r.size else h - r.spare + 1)
        )
    elif fault == "a rewind lowers the high water":
        original = SequenceLayout.rewind

        def rewind(self, position):
            original(self, position)
            self._high_water = self._length

        monkeypatch.setattr(SequenceLayout, "rewind", rewind)
    elif fault == "rows are wrapped one slot late":
        monkeypatch.setattr(ring_module, "wrap", _wrap_one_late)
    elif fault == "the ring is one slot too small":
        monkeypatch.setattr(RingLayout, "size", property(lambda r: r.window + r.spare - 2 or 1))
    elif fault == "the read starts one row late":
        monkeypatch.setattr(
            RingLayout,
            "plan",
            _ring_plan(lambda plan: plan._replace(read_position=plan.read_position + 1)),
        )
    elif fault == "old rows are read after the write":
        monkeypatch.setattr(
            RingLayout, "plan", _ring_plan(lambda plan: plan._replace(joined=False))
        )
    elif fault == "a commit adds its tokens each time":

        def commit(self, plan):
            self._step_position = plan.position
            self._length += plan.tokens
            self._high_water = max(self._high_water, self._length)

        monkeypatch.setattr(SequenceLayout, "commit", commit)
    else:
        raise LookupError(fault)


@pytest.mark.parametrize(
    "fault",
    [
        "the floor is length - window",
        "the floor is one too low",
        "the floor is one too high",
        "a rewind lowers the high water",
        "rows are wrapped one slot late",
        "the ring is one slot too small",
        "the read starts one row late",
        "old rows are read after the write",
        "a commit adds its tokens each time",
    ],
)
def test_walk_catches_a_planted_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    _planted(monkeypatch, fault)
    with pytest.raises((AssertionError, PositionError)):
        walks()
