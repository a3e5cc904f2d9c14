"""Batched sequences: each with a store of its own, all under one capacity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from mlx_kvcache.errors import CapacityError, RewindError, StepError
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.layout.shared import SharedLayout
from mlx_kvcache.layout.standing import Standing
from mlx_kvcache.layout.steps import DeclaredStep


class HasLayout(Protocol):
    """A sequence that plans and commits its own rows."""

    @property
    def layout(self) -> SequenceLayout:
        """Where its rows lie."""


class Kept(NamedTuple):
    """What a sequence held before a step that its rings cannot take back.

    length, high_water: of the sequence, then. rows: as its cache can put them back.
    """

    length: int
    high_water: int
    rows: Any


Batched = TypeVar("Batched", bound=HasLayout)


class BatchedLayout(SharedLayout[Batched]):
    """The sequences whose lengths together stay within one capacity, and who holds them.

    Each plans and commits its own rows. This one gives out ids and admits steps.
    """

    def __init__(
        self,
        capacity: int,
        max_context: int | None = None,
        members: Mapping[int, Batched] | None = None,
    ) -> None:
        super().__init__(capacity, max_context)
        held = dict(members or {})
        self.now = Standing(held, {key: each.layout.length for key, each in held.items()})

    @property
    def used(self) -> int:
        """Positions that all sequences hold together, a placed step included."""
        return sum(self.now.lengths.values())

    def add(self, member: Batched) -> int:
        """Take an empty sequence in and answer its id, the lowest that is not in use."""
        identity = self._lowest_unused_id()
        self.now = self.now.with_member(identity, member, 0)
        return identity

    def add_fork(self, member: Batched) -> int:
        """Take a fork in, of which `check_fork` said that it fits, and answer its id."""
        identity = self._lowest_unused_id()
        self.now = self.now.with_member(identity, member, member.layout.length).moved()
        return identity

    def check_fork(self, sequence: int, up_to: int | None) -> int:
        """How many positions a fork would copy. Raises what refuses it, changes nothing.

        `UnknownSequenceError`, `RewindError` (not held, or overwritten by a ring), `StepError`
        (its newest step is unfinished) or `CapacityError`.
        """
        length = self.fork_length(sequence, up_to)
        if sequence in self.now.unfinished:
            raise StepError(
                f"cannot fork sequence {sequence}: its newest step was not finished; abandon_step "
                "first"
            )
        self._check_rings(sequence, length)
        if length > self.free:
            raise CapacityError(
                f"a fork of {length} positions does not fit: {self.free} of {self.capacity} "
                "are free; remove or rewind sequences, or make the cache with a larger capacity"
            )
        return length

    def check_rewind(self, sequence: int, position: int) -> None:
        super().check_rewind(sequence, position)
        self._check_rings(sequence, position)

    def begin_rewind(self, sequence: int, position: int) -> None:
        """Record that a sequence is being put back, so that no step begins until `rewound`."""
        unfinished = {**self.now.unfinished, sequence: position}
        self.now = self.now._replace(unfinished=unfinished).moved()

    def rewound(self, sequence: int, position: int) -> None:
        """Record that a sequence was rewound."""
        self.now = self.now.rewound(sequence, position)

    def remove(self, sequence: int) -> None:
        """Forget a sequence. Its id may be given again. Raises `UnknownSequenceError`."""
        self.position(sequence)
        self.now = self.now.without_member(sequence)

    def keep(self, kept: Mapping[int, Kept]) -> None:
        """Keep, until the placed step is finished, what puts these of its sequences back."""
        self.now = self.now._replace(kept={**self.now.kept, **kept})

    def rewind_floor(self, sequence: int) -> int:
        """The lowest position, other than 0, that every ring of a sequence can go back to."""
        self.position(sequence)
        layout, kept = self.now.members[sequence].layout, self.now.kept.get(sequence)
        if kept is None:
            return layout.rewind_floor
        return max(each.rewind_floor(kept.high_water) for each in layout.layers)

    def _check_rings(self, sequence: int, position: int) -> None:
        floor = self.rewind_floor(sequence)
        if 0 < position < floor:
            length = self.now.unfinished.get(sequence, self.now.lengths[sequence])
            raise RewindError(
                f"cannot go back to {position} in sequence {sequence}: a sliding-window layer has "
                f"overwritten rows that it needs; {floor} to {length} can be reached, or 0 to "
                "start again. A larger spare keeps more spare rows"
            )

    def _claim(self, step: DeclaredStep) -> None:
        """Each sequence takes its own rows."""
