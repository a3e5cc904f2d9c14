"""A brute-force model of a cache layer: each slot stores which position it holds.

It knows the specification only: a ring of window w and m spare rows has w + m - 1 slots, and a
query at position p sees max(0, p - w + 1) .. p. Every step that the layout plans is carried out
here slot by slot, and every row read is looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from mlx_kvcache.errors import RewindError
from mlx_kvcache.facts.geometry import LayerPolicy
from mlx_kvcache.layout import Run, SequenceLayout, StepPlan


class SlotLayer:
    """Slots of one layer and the position that each of them holds (None: never written)."""

    def __init__(self, window: int, capacity: int, spare: int) -> None:
        self.window = window
        self.size = min(window, capacity) + min(spare, capacity) - 1 if window else capacity
        self.slots: list[int | None] = [None] * self.size

    def first_visible(self, position: int) -> int:
        return max(0, position - self.window + 1) if self.window else 0

    def gather(self, runs: Sequence[Run]) -> list[int | None]:
        rows: list[int | None] = []
        for run in runs:
            assert run.length >= 1, f"an empty run: {run}"
            assert run.start >= 0, f"a run before the first slot: {run}"
            assert run.start + run.length <= self.size, f"a run beyond {self.size} slots: {run}"
            rows += self.slots[run.start : run.start + run.length]
        return rows

    def carry_out(self, plan: StepPlan, position: int, count: int) -> None:
        """Do what the plan says, in its order, and check every row that it reads or writes."""
        first, end = self.first_visible(position), position + count
        assert (plan.position, plan.tokens, plan.end) == (position, count, end)
        assert plan.read_position == first, (plan, first)
        assert len(plan.read) <= 2
        assert len(plan.write) <= 2
        if plan.joined:
            assert self.gather(plan.read) == list(range(first, position)), (plan, self.slots)
        self._write(plan, end)
        if not plan.joined:
            assert plan.skipped == 0, f"rows are answered from the slots but not stored: {plan}"
            assert self.gather(plan.read) == list(range(first, end)), (plan, self.slots)
        for kept in range(self.first_visible(end), end):
            assert self.slots[kept % self.size] == kept, f"{kept} did not survive {plan}"

    def _write(self, plan: StepPlan, end: int) -> None:
        stored = sum(run.length for run in plan.write)
        assert stored == min(plan.tokens, self.size), (plan, self.size)
        assert stored + plan.skipped == plan.tokens, plan
        self.gather(plan.write)
        targets = [run.start + offset for run in plan.write for offset in range(run.length)]
        assert len(set(targets)) == len(targets), f"a slot is written twice: {plan}"
        for slot, written in zip(targets, range(end - stored, end), strict=True):
            assert slot == written % self.size, f"position {written} written to slot {slot}"
            self.slots[slot] = written

    def finds_window(self, position: int) -> bool:
        """Whether a step at `position` finds all earlier rows that its first query sees."""
        needed = range(self.first_visible(position), position)
        return all(self.slots[row % self.size] == row for row in needed)


class SlotSequence:
    """A `SequenceLayout` and its brute-force model, driven and compared step by step."""

    def __init__(self, windows: Sequence[int], capacity: int, spare: int) -> None:
        self.windows = tuple(windows)
        self.capacity = capacity
        self.spare = spare
        policies = [LayerPolicy.from_window(window) for window in windows]
        self.layout = SequenceLayout(policies, capacity, spare)
        self.layers = [SlotLayer(window, capacity, spare) for window in windows]
        self.length = 0
        self.high_water = 0

    @property
    def room(self) -> int:
        return self.capacity - self.length

    def observe(self) -> tuple[object, ...]:
        """Everything that a caller can see of the layout now."""
        layout = self.layout
        room = self.room
        steps = sorted({count for count in (1, 2, self.spare, room) if 1 <= count <= room})
        return (
            layout.length,
            layout.high_water,
            layout.rewind_floor,
            layout.capacity,
            layout.layers,
            [layout.can_extend(count) for count in (0, 1, room, room + 1)],
            [
                layout.plan(layer, self.length, count)
                for layer in range(len(self.layers))
                for count in steps
            ],
        )

    def step(self, count: int, order: Sequence[int], commits: Iterable[int]) -> None:
        """A step of `count` rows, layers in `order`, committed after the layers in `commits`.

        The last layer always commits, so that the step is not lost.
        """
        position, end = self.length, self.length + count
        commits = {*commits, order[-1]}
        planned = {layer: self.layout.plan(layer, position, count) for layer in order}
        assert self.layout.length == position, "planning committed something"
        for layer in order:
            plan = self.layout.plan(layer, position, count)
            assert plan == planned[layer], "the plan changed while the step ran"
            self.layers[layer].carry_out(plan, position, count)
            if layer in commits:
                self.layout.commit(plan)
                assert self.layout.length == end
        self._advanced(end)

    def append(self, count: int) -> None:
        """The same through `append`, which must leave what plan and commit would leave."""
        position = self.length
        twin = copy.deepcopy(self.layout)
        for layer, slots in enumerate(self.layers):
            plan = twin.plan(layer, position, count)
            twin.commit(plan)
            slots.carry_out(plan, position, count)
        self.layout.begin(position, count)
        assert self.layout.unwritten == len(self.layers)
        self.layout.unwritten = 0
        for layer in range(len(self.layers)):
            assert self.layout.plan(layer, position, count) == twin.plan(layer, position, count)
        self._advanced(position + count)
        assert (twin.length, twin.high_water) == (self.length, self.high_water)

    def _advanced(self, end: int) -> None:
        self.length = end
        self.high_water = max(self.high_water, end)
        self.check_state()

    def rewind(self, position: int) -> bool:
        """Try to rewind; answers whether the layout let it. It must be exactly right about it."""
        before = self.observe()
        possible = self.truth(position)
        try:
            self.layout.rewind(position)
        except RewindError:
            assert not possible, f"refused {position}, which is safe: {self}"
            assert self.observe() == before, "a refused rewind changed something"
            return False
        assert possible, f"rewound to {position}, which is not safe: {self}"
        self.length = position
        self.high_water = 0 if position == 0 else self.high_water
        self.check_state()
        return True

    def clear(self) -> None:
        self.layout.clear()
        self.length = self.high_water = 0
        self.check_state()

    def truth(self, position: int) -> bool:
        """Whether a rewind to `position` is safe, looked up in the slots."""
        if not 0 <= position <= self.length:
            return False
        return all(layer.finds_window(position) for layer in self.layers)

    def check_state(self) -> None:
        assert self.layout.length == self.length
        assert self.layout.high_water == self.high_water
        assert self.layout.can_extend(self.room)
        assert not self.layout.can_extend(self.room + 1)

    def check_every_target(self) -> None:
        """Compare the layout's answer with the truth for every position, and step from some."""
        possible = []
        for position in range(-1, self.length + 2):
            try:
                self.layout.check_rewind(position)
            except RewindError:
                assert not self.truth(position), f"refuses {position}, which is safe: {self}"
            else:
                assert self.truth(position), f"allows {position}, which is not safe: {self}"
                possible.append(position)
        for position in {*possible[:3], *possible[len(possible) // 2 :][:1], *possible[-2:]}:
            self._check_steps_from(position)

    def _check_steps_from(self, position: int) -> None:
        branch = copy.deepcopy(self)
        assert branch.rewind(position)
        for count in {1, self.spare, self.spare + 1}:
            if count <= branch.room:
                twig = copy.deepcopy(branch)
                twig.step(count, range(len(self.layers)), ())

    def __deepcopy__(self, memo: dict[int, object]) -> SlotSequence:
        twin = copy.copy(self)
        twin.layout = copy.deepcopy(self.layout, memo)
        twin.layers = [copy.copy(layer) for layer in self.layers]
        for layer in twin.layers:
            layer.slots = list(layer.slots)
        return twin

    def __repr__(self) -> str:
        return (
            f"windows {self.windows}, spare {self.spare}, capacity {self.capacity}, "
            f"length {self.length}, high water {self.high_water}"
        )
