"""Cells: one store of rows for many sequences, where a row belongs to all who share it."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.layout.cell_map import draw_cells
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.layout.shared import SharedLayout
from mlx_kvcache.layout.standing import Standing
from mlx_kvcache.layout.steps import DeclaredStep

#: Cell indices are 32-bit, as MLX's row indices are.
CELL_TYPE = "i"


class CellLayout(SharedLayout["_Member"]):
    """Which cells are taken, at which position, and by which sequences.

    A token takes the lowest free cell. A fork adds an owner to the cells of its prefix and takes
    none; a cell frees when its last owner leaves. All taken cells lie below `used_end`, which
    shrinks with them. A cell index means the same row in every layer.

    The cells of the members say it all; the owners, positions and holes follow from them.
    """

    def __init__(self, capacity: int, max_context: int | None = None) -> None:
        super().__init__(capacity, max_context)
        # By cell, below used_end: the set of owners as a bit mask, and the position.
        self._owners: list[int] = []
        self._positions = array(CELL_TYPE)
        self._used = 0
        # Free cells below used_end, and possibly some beyond it that were cut off.
        self._holes: list[int] = []
        self._placed_cells = array(CELL_TYPE)

    @property
    def members(self) -> dict[int, _Member]:
        """The live sequences by id, to be read and not changed."""
        if self._is_torn:
            self._mend()
        return self.now.members

    @property
    def used(self) -> int:
        """Cells that have an owner."""
        if self._is_torn:
            self._mend()
        return self._used

    @property
    def used_end(self) -> int:
        """The end of the taken cells: the cell after the last one that has an owner."""
        if self._is_torn:
            self._mend()
        return len(self._owners)

    @property
    def placed_cells(self) -> Sequence[int]:
        """The cell of each token of the step that was placed last."""
        return self._placed_cells

    def cells(self, sequence: int) -> array[int]:
        """The cell of each position of a sequence, to be read and not changed.

        Raises `UnknownSequenceError`.
        """
        self.position(sequence)
        return self.members[sequence].cells

    def is_contiguous(self, sequence: int, first: int = 0) -> bool:
        """Whether the positions from `first` on lie in consecutive cells, in order."""
        self.position(sequence)
        breaks = self.members[sequence].breaks
        return not breaks or breaks[-1] <= first

    def owners(self, cell: int) -> tuple[int, ...]:
        """The sequences that own a cell, ascending; none for a free one."""
        return tuple(_bits(self._owners[cell])) if 0 <= cell < self.used_end else ()

    def position_of_cell(self, cell: int) -> int:
        """The position that a cell holds, -1 for a free one."""
        return self._positions[cell] if 0 <= cell < self.used_end else -1

    def at_rest(self) -> CellLayout:
        """A copy that shares nothing and has no step. Every step must be finished."""
        twin = CellLayout(self.capacity, self.max_context)
        members = {
            sequence: each.prefix(len(each.cells)) for sequence, each in self.members.items()
        }
        twin.now = Standing(members, dict(self.now.lengths))
        twin._owners, twin._positions = list(self._owners), self._positions[:]
        twin._used, twin._holes = self._used, list(self._holes)
        return twin

    def new(self) -> int:
        """Begin an empty sequence and answer its id, the lowest that is not in use."""
        sequence = self._lowest_unused_id()
        self.now = self.now.with_member(sequence, _Member(array(CELL_TYPE), []), 0)
        return sequence

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence that shares the cells of another, up to a position; takes no cell.

        Raises `UnknownSequenceError`, `RewindError` for an `up_to` that is not held, or
        `StepError` for rows of an unfinished step.
        """
        length = self.fork_length(sequence, up_to)
        twin = self.members[sequence].prefix(length)
        identity = self._lowest_unused_id()
        joined = _WithOwner(1 << identity)
        self._is_torn = True
        self.now = self.now.with_member(identity, twin, length).moved()
        for start, count in twin.runs():
            end = start + count
            self._owners[start:end] = map(joined.__getitem__, self._owners[start:end])
        self._is_torn = False
        return identity

    def remove(self, sequence: int) -> None:
        """Forget a sequence; its cells free unless others own them. Its id may be given again.

        Raises `UnknownSequenceError`.
        """
        self.position(sequence)
        member = self.members[sequence]
        self._is_torn = True
        self.now = self.now.without_member(sequence)
        self._disown(sequence, member.cells)
        self._is_torn = False

    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on; any held position will do.

        Raises `UnknownSequenceError`, `RewindError`, or `StepError` when the position is within
        an unfinished step.
        """
        self.check_rewind(sequence, position)
        member = self.members[sequence]
        self._is_torn = True
        self.now = self.now.rewound(sequence, position)
        self._disown(sequence, member.cut(position))
        self._is_torn = False

    def plan_defragment(self) -> array[int]:
        """For each cell of a compact store, the cell that its row lies in now; changes nothing.

        Sequences are laid out one after the other, so that those that share nothing become
        contiguous. Raises `StepError` while a step is unfinished.
        """
        self.check_finished("defragment")
        members = self.members
        met = bytearray(self.used_end)
        order = array(CELL_TYPE)
        for sequence in self.sequences:
            for cell in members[sequence].cells:
                if not met[cell]:
                    met[cell] = 1
                    order.append(cell)
        return order

    def apply_defragment(self, order: array[int]) -> None:
        """Rename the cells after their rows were moved as `plan_defragment` said."""
        renamed = array(CELL_TYPE, bytes(self._positions.itemsize * self.used_end))
        for cell, former in enumerate(order):
            renamed[former] = cell
        members = {}
        for sequence, member in self.members.items():
            members[sequence] = _Member(array(CELL_TYPE), [])
            members[sequence].extend([renamed[cell] for cell in member.cells])
        self._is_torn = True
        self.now = self.now._replace(members=members).moved()
        self._mend()

    def cell_map(self, width: int = 64) -> str:
        """A drawing of the cells for people: who owns which, where the holes are.

        Raises `ConfigError` for a width that is no integer >= 1.
        """
        if not is_integer(width, 1):
            raise ConfigError(f"a drawing is at least 1 cell wide, got {shortened(width)}")
        return draw_cells(self._owners, self.used, self.capacity, width)

    def _claim(self, step: DeclaredStep) -> None:
        members = self.members
        self._is_torn = True
        cells = self._take(step.tokens)
        for sequence, first, tokens, position in step.spans:
            owner = 1 << sequence
            own = cells[first : first + tokens]
            for cell in own:
                self._owners[cell] = owner
                self._positions[cell] = position
                position += 1
            members[sequence].extend(own)
        self._placed_cells = cells

    def _mend(self) -> None:
        """Derive all that follows from the members anew: a verb was interrupted."""
        members, lengths = self.now.members, self.now.lengths
        for sequence, member in members.items():
            # Of a step that was not placed after all, or a rewind that was not cut.
            member.cut(lengths[sequence])
        end = max((max(member.cells, default=-1) for member in members.values()), default=-1) + 1
        owners = [0] * end
        positions = array(CELL_TYPE, [-1]) * end
        for sequence, member in members.items():
            owner = 1 << sequence
            for position, cell in enumerate(member.cells):
                owners[cell] |= owner
                positions[cell] = position
        holes = [cell for cell in range(end) if not owners[cell]]
        self._owners, self._positions, self._holes = owners, positions, holes
        self._used = end - len(holes)
        self._is_torn = False

    def _take(self, count: int) -> array[int]:
        """The `count` lowest free cells, ascending; those beyond used_end are appended."""
        cells = array(CELL_TYPE)
        holes = self._holes
        end = len(self._owners)
        while holes and len(cells) < count:
            if holes[0] >= end:
                # All that is left was cut off when used_end shrank.
                holes.clear()
            else:
                cells.append(heapq.heappop(holes))
        more = count - len(cells)
        cells.extend(range(end, end + more))
        self._owners.extend([0] * more)
        self._positions.extend([-1] * more)
        self._used += count
        return cells

    def _disown(self, sequence: int, cells: Iterable[int]) -> None:
        owner = 1 << sequence
        freed = []
        for cell in cells:
            self._owners[cell] ^= owner
            if not self._owners[cell]:
                self._positions[cell] = -1
                freed.append(cell)
        self._used -= len(freed)
        end = len(self._owners)
        while end and not self._owners[end - 1]:
            end -= 1
        del self._owners[end:]
        del self._positions[end:]
        for cell in freed:
            if cell < end:
                heapq.heappush(self._holes, cell)


class _Member:
    """The cells of one sequence by position, and the positions whose cell does not follow on."""

    __slots__ = ("breaks", "cells")

    def __init__(self, cells: array[int], breaks: list[int]) -> None:
        self.cells = cells
        self.breaks = breaks

    def extend(self, cells: Sequence[int]) -> None:
        """Append cells for the next positions."""
        last = self.cells[-1] if self.cells else cells[0] - 1 if cells else -1
        for position, cell in enumerate(cells, len(self.cells)):
            if cell != last + 1:
                self.breaks.append(position)
            last = cell
        self.cells.extend(cells)

    def cut(self, position: int) -> array[int]:
        """Drop the positions from `position` on and answer their cells."""
        dropped = self.cells[position:]
        del self.cells[position:]
        # The first cell follows no other, so a sequence that was emptied has no break left.
        del self.breaks[bisect_left(self.breaks, position) :]
        return dropped

    def prefix(self, length: int) -> _Member:
        """A copy of the first `length` positions."""
        return _Member(self.cells[:length], self.breaks[: bisect_left(self.breaks, length)])

    def runs(self) -> Iterator[Run]:
        """The cells as runs, in the order of the positions."""
        ends = [*self.breaks, len(self.cells)]
        first = 0
        for end in ends:
            if end > first:
                yield Run(self.cells[first], end - first)
            first = end


class _WithOwner(dict[int, int]):
    """Sets of owners with one more in them: equal sets become one object."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, owners: int) -> int:
        joined = self[owners] = owners | self._owner
        return joined


def _bits(owners: int) -> Iterator[int]:
    while owners:
        lowest = owners & -owners
        yield lowest.bit_length() - 1
        owners ^= lowest


def runs_of_cells(cells: Sequence[int]) -> tuple[Run, ...]:
    """The runs of consecutive cells in a list of cells, in its order."""
    runs: list[Run] = []
    start = length = 0
    for cell in cells:
        if length and cell == start + length:
            length += 1
            continue
        if length:
            runs.append(Run(start, length))
        start, length = cell, 1
    if length:
        runs.append(Run(start, length))
    return tuple(runs)
