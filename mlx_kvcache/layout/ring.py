"""The ring layer: keeps the newest rows, slot = position mod size."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_kvcache.layout.runs import StepPlan, wrap

#: Spare rows that are worth no growth of their own, whatever the window.
FEW_ROWS = 512


@dataclass(frozen=True)
class RingLayout:
    """Rows of a layer whose queries see the newest `window` positions, themselves included.

    `spare` rows beyond the window let a step of up to `spare` tokens be written before it is
    read, and a wrapped ring be rewound by as many positions.
    """

    window: int
    spare: int

    @property
    def size(self) -> int:
        """Slots of the ring: the last of `spare` new queries still finds its whole window."""
        return self.window + self.spare - 1

    @property
    def read_whole_from(self) -> int:
        """The position from which on a decode step may read the whole ring, in slot order.

        Few spare rows are read along with the window as soon as it is full; many are not
        allocated before the ring wraps.
        """
        return self.window if self.spare <= max(self.window, FEW_ROWS) else self.size

    def whole(self, rows: int) -> int:
        """`rows`, or the whole ring where they hold the window already and few are left to add.

        A few spare rows are not worth a copy of their own.
        """
        return self.size if rows >= self.read_whole_from else rows

    def plan(self, position: int, count: int) -> StepPlan:
        """Write the new rows over the oldest, read the union of the queries' windows."""
        size = self.size
        end = position + count
        first = max(0, position - self.window + 1)
        stored = min(count, size)
        write = wrap(end - stored, stored, size)
        if end - first <= size:
            read = wrap(first, end - first, size)
            return StepPlan(position, count, write, 0, read, first, False)
        old = wrap(first, position - first, size)
        return StepPlan(position, count, write, count - stored, old, first, True)

    def rewind_floor(self, high_water: int) -> int:
        """The lowest position that still finds its window, given the highest end ever written.

        The slots hold positions `high_water - size` and up. A query at position n needs those
        from `n - window + 1`, hence n >= high_water - spare. A window of 1 needs no old row.
        """
        if self.window == 1 or high_water <= self.size:
            return 0
        return high_water - self.spare
