"""How the sequences of a shared capacity stand, between any two moments of a verb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from mlx_kvcache.layout.steps import DeclaredStep

Member = TypeVar("Member")


class Standing(NamedTuple, Generic[Member]):
    """How the sequences stand: a value that every verb replaces as a whole.

    members: the live sequences by id. lengths: the positions that each of them holds. unfinished:
    those whose newest step was placed and not finished, or whose rewind was interrupted, and
    where they can go back to. kept: what puts some of these back. declared: the step that is yet
    to be placed. placed: the step that was placed last, unless a verb or a declaration has followed
    it. has_moved: whether a verb has followed the declaration.
    """

    members: dict[int, Member]
    lengths: dict[int, int]
    unfinished: Mapping[int, int] = {}
    kept: Mapping[int, Any] = {}
    declared: DeclaredStep | None = None
    placed: DeclaredStep | None = None
    has_moved: bool = False

    def with_member(self, sequence: int, member: Member, length: int) -> Standing[Member]:
        """With one more sequence."""
        return self._replace(
            members=self.members | {sequence: member}, lengths=self.lengths | {sequence: length}
        )

    def without_member(self, sequence: int) -> Standing[Member]:
        """Without a sequence, and without the placement."""
        return self._replace(
            members=_without(self.members, sequence),
            lengths=_without(self.lengths, sequence),
            unfinished=_without(self.unfinished, sequence),
            kept=_without(self.kept, sequence),
        ).moved()

    def rewound(self, sequence: int, position: int) -> Standing[Member]:
        """With a sequence that was put back whole, and without the placement."""
        return self._replace(
            lengths=self.lengths | {sequence: position},
            unfinished=_without(self.unfinished, sequence),
            kept=_without(self.kept, sequence),
        ).moved()

    def moved(self) -> Standing[Member]:
        """After a verb: the placement goes, a declaration may be out of date."""
        return self._replace(placed=None, has_moved=True)


def _without(mapping: Mapping[int, Any], key: int) -> dict[int, Any]:
    left = dict(mapping)
    left.pop(key, None)
    return left
