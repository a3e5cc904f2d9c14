"""One sequence over many layers: a single logical length, planned and committed in integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_kvcache.errors import (
    CapacityError,
    ConfigError,
    LayerIndexError,
    PositionError,
    RewindError,
)
from mlx_kvcache.facts.checks import is_integer
from mlx_kvcache.facts.geometry import LayerPolicy
from mlx_kvcache.layout.flat import FlatLayout
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.runs import StepPlan

LayerLayout = FlatLayout | RingLayout


def layer_layout(policy: LayerPolicy, capacity: int, spare: int) -> LayerLayout:
    """The layout that serves a policy, with `spare` spare rows for a ring.

    A window beyond the capacity hides nothing, so the ring need not be larger than that.
    """
    if policy.kind == "flat":
        return FlatLayout()
    return RingLayout(min(policy.window, capacity), min(spare, capacity))


class SequenceLayout:
    """Where the rows of one sequence lie, for layers of any policy, under one logical length.

    The one home of what a sequence is: its length, its high water, and the step that runs. `plan`
    is pure. `commit` takes the maximum, so that committing once a step or once a layer is the
    same. A refused call changes nothing.

    unwritten: how many layers have yet to follow the newest step, or the newest `rewind_layer`.
    Whoever moves rows counts it down; until it is 0, no step begins. kept: what puts back the rows
    that the running step overwrites although its start needs them, by layer: whoever moves rows
    keeps it until the step is done. room: up to which position every layer may have rows; whoever
    allocates them sets it.
    """

    def __init__(self, policies: Sequence[LayerPolicy], capacity: int, spare: int) -> None:
        if not policies or capacity < 1 or spare < 1:
            raise ConfigError(
                "a sequence needs at least one layer, a capacity and a spare >= 1, got "
                f"{len(policies)} layers, capacity {capacity} and spare {spare}"
            )
        self.capacity = capacity
        self._distinct: dict[LayerPolicy, LayerLayout] = {}
        for policy in policies:
            if policy not in self._distinct:
                self._distinct[policy] = layer_layout(policy, capacity, spare)
        self._layers = tuple(self._distinct[policy] for policy in policies)
        self._length = 0
        self._high_water = 0
        # Where the newest step or rewind began: a position at which every layer stood.
        self._start: int | None = None
        # The high water before the newest step.
        self._former_high_water = 0
        self.unwritten = 0
        self.kept: dict[int, Any] | None = None
        self.room = 0

    @property
    def length(self) -> int:
        """Positions held: the next token's position."""
        return self._length

    @property
    def high_water(self) -> int:
        """The highest end written since the last clear; a rewind does not lower it."""
        return self._high_water

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """The layout of each layer; layers of one policy share one object."""
        return self._layers

    @property
    def rewind_floor(self) -> int:
        """The lowest position, other than 0, to which every layer can go back."""
        return self._floor(self._certain_high_water)

    @property
    def is_overwritten(self) -> bool:
        """Whether the step that runs overwrites rows that its own start needs, and are kept."""
        start = self._start
        return bool(self.unwritten) and start is not None and self._floor(self._high_water) > start

    @property
    def _certain_high_water(self) -> int:
        """The high water of the rows that are there once what is kept was put back."""
        return self._former_high_water if self.is_overwritten else self._high_water

    def _floor(self, high_water: int) -> int:
        return max(layout.rewind_floor(high_water) for layout in self._distinct.values())

    @property
    def _settled(self) -> int:
        """The highest position at which every layer stood."""
        return self._length if self._start is None or not self.unwritten else self._start

    def can_extend(self, count: int = 1) -> bool:
        """Whether `count` more positions fit. Raises `CapacityError` for what is no such number."""
        if not is_integer(count, 0):
            raise CapacityError(f"a number of positions >= 0 may be asked for, got {count!r}")
        return self._length + count <= self.capacity

    def admit(self, position: int, count: int) -> None:
        """Raise unless a step of `count` rows at `position` may run now.

        It may when it continues the sequence, or when it is the step that another layer has
        already begun. Raises `PositionError` or `CapacityError`.
        """
        if count < 1:
            raise PositionError(f"a step needs at least one token, got {count}")
        end = position + count
        if position == self._length:
            self.check_settled()
        if position != self._length and not (position == self._start and end == self._length):
            raise PositionError(
                f"a step of {count} tokens at position {position} does not continue the sequence, "
                f"which holds {self._length} positions; continue at {self._length}, "
                "or rewind first"
            )
        if end > self.capacity:
            raise CapacityError(
                f"{count} tokens at position {position} need {end} positions, but the capacity is "
                f"{self.capacity}; make the cache with a larger capacity, or rewind or clear it"
            )

    def check_settled(self) -> None:
        """Raise `PositionError` while some layers have not followed the newest step or rewind."""
        if self.unwritten:
            raise PositionError(
                f"{self.unwritten} layers have not followed to position {self._length}: a step or "
                f"a rewind was interrupted half-way; rewind to {self._settled} or less first"
            )

    def plan(self, layer: int, position: int, count: int) -> StepPlan:
        """What a step of `count` rows at `position` writes and reads in `layer`; changes nothing.

        Raises `LayerIndexError`, `PositionError` or `CapacityError`.
        """
        if not 0 <= layer < len(self._layers):
            raise LayerIndexError(
                f"cache layer {layer} does not exist; there are {len(self._layers)}, counted from 0"
            )
        self.admit(position, count)
        return self._layers[layer].plan(position, count)

    def commit(self, plan: StepPlan) -> None:
        """Record that a planned step was written.

        Raises `PositionError` or `CapacityError`, and changes nothing, when the sequence has moved
        since the plan was made.
        """
        self.admit(plan.position, plan.tokens)
        high = max(self._high_water, plan.end)
        self._start, self._length, self._high_water = plan.position, plan.end, high

    def begin(self, position: int, tokens: int) -> None:
        """Admit and commit a step that every layer is yet to write; nothing, when it runs already.

        Raises `PositionError` or `CapacityError`, and then changes nothing.
        """
        end = position + tokens
        if position != self._length or self.unwritten or end > self.capacity or tokens < 1:
            self.admit(position, tokens)
            if position != self._length:
                return
        high = self._high_water if self._high_water > end else end
        # One statement.
        (
            self._start, self._length, self._former_high_water, self._high_water, self.unwritten,
            self.kept,
        ) = position, end, self._high_water, high, len(self._layers), None  # fmt: skip

    def check_rewind(self, position: int) -> None:
        """Raise `RewindError` unless `rewind(position)` is possible now."""
        floor = self.rewind_floor
        if not is_integer(position):
            raise RewindError(f"a rewind needs an integer position, got {position!r}")
        if not 0 <= position <= self._length:
            raise RewindError(
                f"cannot rewind to {position}: the sequence holds {self._length} positions, "
                f"so 0 to {self._length} can be asked for",
                nearest=self._settled if position > 0 and self._settled >= floor else 0,
            )
        if position > self._settled:
            raise RewindError(
                f"cannot rewind to {position}: a step was interrupted and some layers hold only "
                f"{self._settled} positions; rewind to {self._settled} or less, or clear the cache",
                nearest=self._settled if self._settled >= floor else 0,
            )
        if position != 0 and position < floor:
            raise RewindError(
                f"cannot rewind from {self._length} to {position}: a sliding-window layer has "
                f"overwritten rows that position {position} needs; {floor} to "
                f"{self._length} can be reached, or 0 to start again. A larger spare keeps "
                "more spare rows"
            )

    def rewind(self, position: int) -> None:
        """Forget every position from `position` on. Rewinding to 0 is always possible.

        Raises `RewindError`, and changes nothing, for a position that is not held or whose window
        a ring has already overwritten.
        """
        self.check_rewind(position)
        if position == 0:
            self.clear()
            return
        if position < self._length:
            self._stand(position, self._certain_high_water, None, 0)
        self.unwritten = 0

    def begin_rewind(self, position: int) -> None:
        """Rewind, not to 0, and let no step begin until `end_rewind`: rows are yet to be put back.

        May be repeated. Raises `RewindError`, and changes nothing, as `rewind` does.
        """
        self.check_rewind(position)
        high_water = self._certain_high_water
        self._stand(position, high_water, position, len(self._layers), self.kept)

    def end_rewind(self, behind: int = 0) -> None:
        """Everything that was kept is in its place; so many layers are yet to follow."""
        self.unwritten, self.kept = behind, None

    def rewind_layer(self, position: int) -> None:
        """Rewind for one layer of those that go back one by one; the first takes the length along.

        Raises `RewindError`, and changes nothing, when the position cannot be reached.
        """
        if position == self._length and position == self._start and self.unwritten:
            self.unwritten -= 1
            return
        self.check_rewind(position)
        ahead = self.layers_ahead(position)
        if not position:
            self.room = 0
        high_water = self._certain_high_water if position else 0
        self._stand(position, high_water, position, ahead - 1)

    def layers_ahead(self, position: int) -> int:
        """How many layers go back when each that is ahead of `position` does."""
        # Of a step that was not finished, only those go back that have written it.
        torn = position == self._start and self.unwritten
        return len(self._layers) - (self.unwritten if torn else 0)

    def clear(self) -> None:
        """Forget every position, and with them the high water."""
        self.restore(0, 0)

    def restore(self, length: int, high_water: int) -> None:
        """Stand where a sequence of the same layers stood."""
        self.room = 0
        self._stand(length, high_water, None, 0)

    def distrust(self) -> None:
        """Refuse every step until `restore`, `clear` or a rewind to 0: rows are being exchanged."""
        self.room = 0
        self._stand(0, 0, None, len(self._layers))

    def _stand(
        self,
        length: int,
        high_water: int,
        start: int | None,
        unwritten: int,
        kept: dict[int, Any] | None = None,
    ) -> None:
        # One statement.
        (
            self._length, self._high_water, self._former_high_water, self._start, self.unwritten,
            self.kept,
        ) = length, high_water, high_water, start, unwritten, kept  # fmt: skip
