"""Runs of contiguous rows, and what one step does to the rows of a layer."""

from __future__ import annotations

from typing import NamedTuple

#: The least by which the rows grow that a traced step reads, and the part of them.
READ_ROWS = 256
READ_PART = 16


class Run(NamedTuple):
    """Contiguous rows `start .. start + length - 1` of a pool."""

    start: int
    length: int


class StepPlan(NamedTuple):
    """The rows that one step of a layer writes and reads.

    position: position of the first new row. tokens: how many new rows there are (T).
    write: where the stored new rows go, oldest first. skipped: how many leading new rows are not
        stored, since the step itself already pushes them out of the ring.
    read: the rows to answer with, oldest first. read_position: position of the first of them.
    joined: the rows in `read` are to be taken before the write, and the new rows follow them.
        The step is too large for the ring to hold everything that its queries may see.
    """

    position: int
    tokens: int
    write: tuple[Run, ...]
    skipped: int
    read: tuple[Run, ...]
    read_position: int
    joined: bool

    @property
    def end(self) -> int:
        """The position after the last new row."""
        return self.position + self.tokens


def wrap(start: int, length: int, size: int) -> tuple[Run, ...]:
    """The runs that positions `start .. start + length - 1` occupy in a ring of `size` slots.

    Position p lies in slot p mod size, so the answer is no run (length 0), one, or two.
    `length` must not exceed `size`.
    """
    if length <= 0:
        return ()
    slot = start % size
    if slot + length <= size:
        return (Run(slot, length),)
    head = size - slot
    return (Run(slot, head), Run(0, length - head))


def grown_rows(current: int, needed: int, limit: int) -> int:
    """Rows after growing from `current` to hold `needed`: doubled until it fits, at most `limit`.

    Doubling bounds the rows copied on the way to n by 2n. Never shrinks; starts from 1 when
    nothing is allocated. The caller has checked that `needed <= limit`.
    """
    if needed <= current:
        return current
    rows = max(current, 1)
    while rows < needed:
        rows *= 2
    return min(rows, limit)


def rows_to_read(end: int) -> int:
    """Rows that a step up to `end` reads when it is traced once for many: at least `end`.

    Each other number is traced anew, and each row beyond `end` is read in vain. So they grow by
    `READ_ROWS`, and later by a power of two, at least one `READ_PART`-th of them.
    """
    step = READ_ROWS
    while step * READ_PART < end:
        step *= 2
    return -(-end // step) * step
