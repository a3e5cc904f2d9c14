"""Histories of a sequence's layout alone, in integers, against slots that hold positions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

from tests.fuzz.history import History
from tests.support.slots_model import SlotSequence


class LayoutHistory(History):
    """Steps, rewinds and clears of `SequenceLayout`; every target of a rewind is judged."""

    kind = "layout"
    turns = 16
    thread_chance = 0.0
    must_meet: ClassVar[tuple[str, ...]] = (
        "interrupts", "a ring wrapped", "refused rewind", "rewind past a wrap",
        "interrupted append", "interrupted rewind", "interrupted clear",
    )  # fmt: skip

    def begin(self) -> None:
        random = self.random
        windows = [random.randint(0, 9) for _ in range(random.randint(1, 3))]
        spare, capacity = random.randint(1, 9), random.choice((1, 9, 17, 25, 60, 120))
        self.sequence = SlotSequence(windows, capacity, spare)
        self.told.append(f"windows {windows}, spare {spare}, capacity {capacity}")

    def verbs(self) -> Mapping[str, float]:
        verbs = {"rewind": 3.0, "clear": 0.3}
        if self.sequence.room:
            verbs |= {"step": 4.0, "append": 2.0, "decode": 3.0}
        return verbs

    def check(self) -> None:
        sequence = self.sequence
        sequence.check_state()
        if self.chance(0.3):
            sequence.check_every_target()
        rings = [layer.size for layer in sequence.layers if layer.window]
        self.meets("a ring wrapped", sequence.high_water > min(rings, default=sequence.high_water))

    def _count(self) -> int:
        largest = max((n.size for n in self.sequence.layers if n.window), default=4)
        count = self.random.choice((1, 2, 3, 5, self.random.randint(1, 3 * largest)))
        self.tell(count)
        return min(count, self.sequence.room)

    def step(self) -> None:
        layers = range(len(self.sequence.layers))
        order = self.random.sample(layers, len(layers))
        commits = {n for n in layers if self.chance(0.5)}
        self.sequence.step(self._count(), order, commits)

    def decode(self) -> None:
        times = self.random.randint(1, 6)
        self.tell(times)
        for _ in range(min(times, self.sequence.room)):
            self.sequence.step(1, range(len(self.sequence.layers)), ())

    def append(self) -> None:
        sequence, count = self.sequence, self._count()
        before, end = copy.deepcopy(sequence), sequence.length + count
        if self.call(lambda: sequence.append(count)):
            return
        layout = sequence.layout
        if layout.length != end:
            # Not begun: nothing was written either.
            assert layout.length == before.length
            sequence.layers, sequence.length = before.layers, before.length
            sequence.high_water = before.high_water
            return
        assert layout.unwritten in (0, len(sequence.layers))
        layout.unwritten = 0
        if all(layer.finds_window(end) for layer in sequence.layers):
            sequence._advanced(end)
        else:
            raise AssertionError("begun before every layer was planned")

    def rewind(self) -> None:
        sequence, length = self.sequence, self.sequence.length
        near = self.chance(0.8)
        position = self.random.randint(max(0, length - 10) if near else -1, length + (not near))
        self.tell(position)
        possible = sequence.truth(position)
        self.meets("refused rewind", not possible)
        past = 0 < sequence.layout.rewind_floor <= position < length
        self.meets("rewind past a wrap", possible and past)
        if self.call(lambda: sequence.rewind(position)):
            return
        layout = sequence.layout
        if not possible:
            assert layout.length == length
            return
        assert layout.length in (position, length)
        layout.rewind(position)
        sequence.length = position
        sequence.high_water = 0 if position == 0 else sequence.high_water

    def clear(self) -> None:
        if not self.call(self.sequence.clear):
            self.sequence.clear()
