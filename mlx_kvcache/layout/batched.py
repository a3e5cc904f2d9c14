"""Batched sequences: each with a store of its own, all under one capacity."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_kvcache.errors import CapacityError, RewindError
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.layout.shared import SharedLayout
from mlx_kvcache.layout.steps import DeclaredStep


class BatchedLayout(SharedLayout):
    """The layouts of many sequences, whose lengths together stay within one capacity.

    Each `SequenceLayout` plans and commits its own rows. This one gives out ids and admits steps.
    """

    def __init__(self, capacity: int, max_context: int | None = None) -> None:
        super().__init__(capacity, max_context)
        self._members: dict[int, SequenceLayout] = {}
        # Tokens of the placed step that its sequences have not committed yet.
        self._claimed: dict[int, int] = {}

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(sorted(self._members))

    @property
    def used(self) -> int:
        """Positions that all sequences hold together, a placed step included."""
        return sum(
            max(member.length, self._claimed.get(sequence, 0))
            for sequence, member in self._members.items()
        )

    def add(self, member: SequenceLayout) -> int:
        """Take a sequence in and answer its id, the lowest that is not in use.

        Raises `CapacityError`, and takes nothing in, when its positions do not fit.
        """
        if member.length > self.free:
            raise CapacityError(
                f"a sequence of {member.length} positions does not fit: {self.free} of "
                f"{self.capacity} are free; remove or rewind sequences, or make the cache "
                "with a larger capacity"
            )
        identity = self._lowest_unused_id()
        self._members[identity] = member
        return identity

    def with_members(self, members: Mapping[int, SequenceLayout]) -> BatchedLayout:
        """A layout of the same limits and ids over these sequences, without a step."""
        twin = BatchedLayout(self.capacity, self.max_context)
        twin._next_id = self._next_id
        twin._returned_ids = list(self._returned_ids)
        twin._members = dict(members)
        return twin

    def check_fork(self, sequence: int, up_to: int | None) -> int:
        """How many positions a fork would copy. Raises what refuses it, changes nothing.

        `UnknownSequenceError`, `RewindError` (not held, or overwritten by a ring), `StepError`
        (rows of an unfinished step) or `CapacityError`.
        """
        length = self.fork_length(sequence, up_to)
        self._check_rings(sequence, length)
        if length > self.free:
            raise CapacityError(
                f"a fork of {length} positions does not fit: {self.free} of {self.capacity} "
                "are free; remove or rewind sequences, or make the cache with a larger capacity"
            )
        return length

    def forked(self) -> None:
        """Record that a sequence was forked: the placement is dropped, as by every verb."""
        self._dropped()

    def check_rewind(self, sequence: int, position: int) -> None:
        super().check_rewind(sequence, position)
        self._check_rings(sequence, position)

    def rewound(self, sequence: int) -> None:
        """Record that a sequence was rewound."""
        self._claimed.pop(sequence, None)
        self._rewound(sequence)

    def remove(self, sequence: int) -> None:
        """Forget a sequence. Its id may be given again. Raises `UnknownSequenceError`."""
        self.position(sequence)
        del self._members[sequence]
        self._claimed.pop(sequence, None)
        self._return_id(sequence)
        self._dropped()

    def finish_step(self) -> None:
        if self.placed is not None:
            for sequence in self.placed.starts:
                self._claimed.pop(sequence, None)
        super().finish_step()

    def _check_rings(self, sequence: int, position: int) -> None:
        try:
            self._members[sequence].check_rewind(position)
        except RewindError as error:
            raise RewindError(f"sequence {sequence}: {error}") from None

    def _length(self, sequence: int) -> int | None:
        member = self._members.get(sequence)
        return None if member is None else member.length

    def _claim(self, step: DeclaredStep) -> None:
        self._claimed.update(step.starts)
        for span in step.spans:
            self._claimed[span.sequence] += span.tokens
