"""What all layers of one policy share while a step runs: computed once, used by each of them."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from mlx_kvcache.cache.masks import NO_POSITION, Mask, StepMasks
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.runs import Run, StepPlan, grown_rows, wrap
from mlx_kvcache.layout.sequence import SequenceLayout


class PolicyStep:
    """The running step of the layers that share one policy.

    A layer on the decode path reads four fields: `position` (of the step, or NO_POSITION when
    the step is not open as a decode step), `end`, `start` (an array, shared by all layers) and
    `stop` (rows to answer with; 0 for the whole pool). Everything else is asked once a step.

    `window` and `ring_size` are 0 for flat layers. `rows` is what every pool must have allocated:
    while one has less, no step is opened as a decode step, so that every layer passes through the
    general path and grows. MLX does not check the bounds of an array start.

    A wrapped ring is answered in the order of its slots when a mask for that order was asked for,
    and in logical order otherwise. With the mask, nothing has to be copied to read it.
    """

    __slots__ = (
        "_allocated",
        "_array_start",
        "_behind",
        "_layer_index",
        "_masks",
        "_ring",
        "_row_limit",
        "_sequence",
        "_slot_starts",
        "end",
        "joined",
        "physical",
        "plan",
        "position",
        "ring_size",
        "rows",
        "start",
        "starts",
        "stop",
        "window",
    )

    def __init__(
        self, sequence: SequenceLayout, layer_index: int, initial_rows: int, array_start: bool
    ) -> None:
        layout = sequence.layers[layer_index]
        self._sequence = sequence
        self._layer_index = layer_index
        self._array_start = array_start
        self._slot_starts: dict[int, mx.array] = {}
        self._ring = layout if isinstance(layout, RingLayout) else None
        self.window = self._ring.window if self._ring else 0
        self.ring_size = self._ring.size if self._ring else 0
        self._row_limit = self.ring_size or sequence.capacity
        # The layers that have a pool, and those whose pool is yet to grow to `rows`.
        self._allocated: set[int] = set()
        self._behind: set[int] = set()
        self._masks = StepMasks(self.window, self.ring_size)
        self.rows = self._allocated_rows(min(initial_rows, self._row_limit))
        self.plan: StepPlan | None = None
        # Rows answered by a step larger than the ring, by layer: for layers that are read again.
        self.joined: dict[int, tuple[mx.array, mx.array]] = {}
        self.physical = False
        self.starts: tuple[int | mx.array, ...] = ()
        self.position = NO_POSITION
        self.end = 0
        self.stop = 0
        self.start: mx.array

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyStep:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._sequence = copy.deepcopy(self._sequence, memo)
        twin._masks = copy.deepcopy(self._masks, memo)
        twin.joined = dict(self.joined)
        twin._allocated = set(self._allocated)
        twin._behind = set(self._behind)
        return twin

    def mask(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        """The mask for the rows with which the step of `tokens` at `position` will be answered.

        `window` narrows the policy's own (0 = no further). A step that another layer was already
        answered in logical order keeps this order. Raises `PositionError` for less than one token
        and `ConfigError` for a negative window.
        """
        if self.plan is not None and not self.physical and self.is_running(position, tokens):
            return self._masks.logical(position, tokens, window, as_array)
        return self._masks.mask(position, tokens, window, as_array)

    def open_decode(self, position: int) -> bool:
        """Open a one-token step for every layer, if it can be served from the four fields.

        Commits it. Raises `PositionError` or `CapacityError`, and then changes nothing.
        """
        if not self._array_start or self._behind:
            return False
        end = position + 1
        window = self.window
        if window and end > window:
            if not self._masks.in_slot_order(position, 1) or self.rows < self.ring_size:
                return False
            self._sequence.append(position, 1)
            self.stop = 0
            slot = position % self.ring_size
            start = self._slot_starts.get(slot)
            if start is None:
                start = self._slot_starts[slot] = mx.array([slot])
            self.start = start
        else:
            if end > self.rows:
                return False
            self._sequence.append(position, 1)
            self.stop = end if end < self.rows else 0
            self.start = mx.array([position])
        if self.plan is not None:
            self._close_plan()
        self.position = position
        self.end = end
        return True

    def open(self, position: int, tokens: int) -> StepPlan:
        """Open any step, or find it open already, and answer its plan. Commits it.

        Raises `PositionError` or `CapacityError`, and then changes nothing.
        """
        plan = self.plan
        if plan is not None and plan.position == position and plan.tokens == tokens:
            return plan
        plan = self._sequence.plan(self._layer_index, position, tokens)
        self._sequence.commit(plan)
        needed = min(plan.end, self._row_limit)
        self._grow_to(self._allocated_rows(grown_rows(self.rows, needed, self._row_limit)))
        self._close_plan()
        self.position = NO_POSITION
        self.plan = plan
        self.end = plan.end
        self.physical = self._masks.in_slot_order(position, tokens)
        if self._array_start:
            self.starts = tuple(mx.array([run.start]) for run in plan.write)
        else:
            self.starts = tuple(run.start for run in plan.write)
        return plan

    def is_running(self, position: int, tokens: int) -> bool:
        """Whether the step of `tokens` at `position` is the one that is open."""
        plan = self.plan
        if plan is not None:
            return plan.position == position and plan.tokens == tokens
        return tokens == 1 and self.position == position

    def read_runs(self, end: int) -> tuple[Run, ...]:
        """The runs of the rows that position `end` may still see, in logical order."""
        if not self.window:
            return (Run(0, end),)
        first = max(0, end - self.window)
        return wrap(first, end - first, self.ring_size)

    def rows_held(self, end: int) -> int:
        """How many positions before `end` are still held: those that no newer row has replaced."""
        if not self.ring_size:
            return end
        return end - min(end, max(0, self._sequence.high_water - self.ring_size))

    def reserve(self, length: int) -> None:
        """Ask for enough rows, at once, that `length` positions fit without growing again."""
        rows = max(self.rows, self._allocated_rows(min(length, self._row_limit)))
        if rows > self.rows and self.position != NO_POSITION and not self.stop:
            # The running step answers with the whole pool, which is about to have more rows.
            self.stop = self.end
        self._grow_to(rows)

    def has_grown(self, layer: int) -> None:
        """Note that the pool of `layer` has the rows that every pool must have."""
        self._allocated.add(layer)
        self._behind.discard(layer)

    def _allocated_rows(self, rows: int) -> int:
        return self._ring.whole(rows) if self._ring else rows

    def _grow_to(self, rows: int) -> None:
        if rows > self.rows:
            self.rows = rows
            self._behind = set(self._allocated)

    @property
    def rewind_floor(self) -> int:
        """The lowest position, other than 0, to which the whole sequence can go back."""
        return self._sequence.rewind_floor

    def rewind_sequence(self, position: int) -> None:
        """Rewind the whole sequence to `position`, unless another layer already did.

        Raises `RewindError`, and changes nothing, when the position cannot be reached.
        """
        if position != self._sequence.length:
            self._sequence.rewind(position)

    def forget(self) -> None:
        """Drop the running step: the sequence was rewound or cleared."""
        self._close_plan()
        self._masks.forget()
        self.position = NO_POSITION

    def _close_plan(self) -> None:
        self.plan = None
        self.physical = False
        self.joined.clear()
