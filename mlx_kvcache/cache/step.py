"""A step of one sequence: what the layers that share a policy write, read and may see."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_kvcache.cache.masks import Mask, band, ring_band, ring_template
from mlx_kvcache.errors import ConfigError, PositionError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import MAX_CAPACITY
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.runs import Run, grown_rows, rows_to_read, wrap
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.rows import Placement, RowView

#: No step has this position.
NO_POSITION = -1
#: Decode masks of a ring are kept by slot while all of them together stay below this.
KEPT_MASK_BYTES = 4 * 2**20


class Step(NamedTuple):
    """One step of the layers that share a policy, made once and used by each of them.

    position, tokens, end: of the step. placement: where its rows go. read: the runs that its
    queries may see, oldest first. joined: whether these are to be read before the write, and the
    new rows follow them. slot_order: whether the rows come in the order of the ring's slots.
    """

    position: int
    tokens: int
    end: int
    placement: Placement
    read: tuple[Run, ...]
    joined: bool
    slot_order: bool


class PolicySteps:
    """Opens the steps of the layers that share one policy, and makes their masks.

    A decode step is served from four fields: `row_at`, its position, `end`, `start`, the row to
    write, and `stop`, the rows to answer with (0 for all). `row_at` is NO_POSITION while no such
    step runs, and where the start is an integer: then `decode_at` alone has the position. Any
    other step is `step`, None while a decode step runs. Whatever depends on the position may be an
    array too, `start` and what a mask is made of, so that a step can be compiled.

    `window` and `ring_size` are 0 for flat layers. `rows` is what
    every layer must have allocated: while one has less, no decode step is opened, so that every
    layer passes through the general path and grows. MLX does not check the bounds of an array
    start.

    A wrapped ring is answered in the order of its slots when a mask for that order was asked for,
    and in logical order otherwise. With the mask, nothing has to be copied to read it.
    """

    __slots__ = (
        "_allocated",
        "_behind",
        "_layer_index",
        "_mask_position",
        "_masks",
        "_ring",
        "_row_limit",
        "_sequence",
        "_slot_masks",
        "_slot_order",
        "_slot_starts",
        "_templates",
        "_whole_from",
        "array_start",
        "decode_at",
        "end",
        "joined",
        "ring_size",
        "row_at",
        "rows",
        "start",
        "step",
        "stop",
        "window",
    )

    def __init__(
        self, sequence: SequenceLayout, layer_index: int, initial_rows: int, array_start: bool
    ) -> None:
        layout = sequence.layers[layer_index]
        self._sequence = sequence
        self._layer_index = layer_index
        self.array_start = array_start
        self._ring = layout if isinstance(layout, RingLayout) else None
        self.window = self._ring.window if self._ring else 0
        self.ring_size = self._ring.size if self._ring else 0
        self._whole_from = self._ring.read_whole_from if self._ring else 0
        self._row_limit = self.ring_size or sequence.capacity
        # The layers that have rows, and how many; and those that are yet to grow to `rows`.
        self._allocated: dict[int, int] = {}
        self._behind: set[int] = set()
        self.rows = self._allocated_rows(min(initial_rows, self._row_limit))
        self.step: Step | None = None
        self.row_at = self.decode_at = NO_POSITION
        self.end = self.stop = 0
        self.start: int | mx.array = 0
        # Rows answered by a step larger than the ring, by layer: for layers that are read again.
        self.joined: dict[int, RowView] = {}
        # Made from numbers of the host, so that they belong to no stream and to no thread.
        self._templates: dict[int, NDArray[np.bool_]] = {}
        self._slot_masks: dict[tuple[int, int], mx.array] = {}
        self._slot_starts: dict[int, mx.array] = {}
        self._forget_masks(NO_POSITION)

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicySteps:
        twin = memo[id(self)] = copy.copy(self)
        twin._sequence = copy.deepcopy(self._sequence, memo)
        twin._allocated = dict(self._allocated)
        twin._behind = set(self._behind)
        twin._slot_masks, twin._slot_starts = {}, {}
        twin.joined = dict(self.joined)
        twin._forget_masks(NO_POSITION)
        return twin

    def mask(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        """The mask for the rows with which the step of `tokens` at `position` will be answered.

        `window` narrows the policy's own (0 = no further). "causal" is answered where it is enough
        and no array is asked for; None for one token that sees all rows answered. A step that
        another layer was already answered in logical order keeps this order. Raises
        `PositionError` for what is no number of tokens, `ConfigError` for what is no window.
        """
        if type(tokens) is not int or type(window) is not int or type(as_array) is not bool:
            _refuse_mask(tokens, window, as_array)
        own, size = self.window, self.ring_size
        step = self.step
        if (
            step is not None
            and step.position == position
            and step.tokens == tokens
            and not step.slot_order
        ):
            return self._logical_mask(position, tokens, window, as_array)
        if tokens == 1 and own and position >= self._whole_from and window >= 0:
            if position != self._mask_position:
                self._forget_masks(position)
            self._slot_order.add(1)
            narrow = window if 0 < window < own else own
            mask = self._slot_masks.get((position % size, narrow))
            return self._decode_mask(position % size, narrow) if mask is None else mask
        if window < 0 or tokens < 1 or tokens > MAX_CAPACITY:
            _refuse_mask(tokens, window, as_array)
        end = position + tokens
        first = self._first_row(position)
        if size and tokens > 1 and end - first <= size and first // size != (end - 1) // size:
            if position != self._mask_position:
                self._forget_masks(position)
            self._slot_order.add(tokens)
            key = (tokens, self._narrower(window), True)
            if key not in self._masks:
                self._masks[key] = ring_band(position, tokens, size, key[1])
            return self._masks[key]
        return self._logical_mask(position, tokens, window, as_array)

    def open_decode(self, position: int) -> bool:
        """Open a one-token step for every layer, if it can be served from the four fields.

        Commits it. Raises `PositionError` or `CapacityError`, and then changes nothing.
        """
        if self._behind or position >= self._sequence.room:
            return False
        end = position + 1
        window = self.window
        start: int | mx.array | None
        if window and end > window:
            if (
                position < self._whole_from
                or self._mask_position != position
                or 1 not in self._slot_order
                or self.rows < self.ring_size
            ):
                return False
            self._sequence.begin(position, 1)
            stop = 0
            slot = position % self.ring_size
            start = self._slot_starts.get(slot) if self.array_start else slot
            if start is None:
                start = self._slot_starts[slot] = mx.array([slot])
        else:
            self._sequence.begin(position, 1)
            stop = end if end < self.rows else 0
            start = mx.array([position]) if self.array_start else position
            if self._masks and self._mask_position != position:
                self._forget_masks(NO_POSITION)
        if self.joined:
            self.joined.clear()
        self.step = None
        self.end, self.start, self.stop = end, start, stop
        self.decode_at = position
        self.row_at = position if self.array_start else NO_POSITION
        return True

    def open(self, position: int, tokens: int) -> Step:
        """Open any step, or find it open already, and commit it. There must be rows for it.

        Raises `PositionError` or `CapacityError`, and then changes nothing.
        """
        step = self.step
        if step is not None and step.position == position and step.tokens == tokens:
            return step
        plan = self._sequence.plan(self._layer_index, position, tokens)
        self._sequence.begin(position, tokens)
        slot_order = self._mask_position == position and tokens in self._slot_order
        starts: tuple[int | mx.array, ...] = tuple(run.start for run in plan.write)
        if self.array_start:
            starts = tuple(mx.array([run.start]) for run in plan.write)
        self.joined.clear()
        self.row_at = self.decode_at = NO_POSITION
        self.step = Step(
            position,
            tokens,
            plan.end,
            Placement(plan.write, starts),
            (Run(0, self.rows),) if slot_order and not plan.joined else plan.read,
            plan.joined,
            slot_order,
        )
        return self.step

    def traceable_rows(self, position: int, tokens: int) -> int:
        """How many rows a traced step reads: enough for later ones too; 0 where it may not run.

        It needs the rows of every layer, and spare rows for its own, so that it can be taken back.
        """
        if self._behind or (self._ring and tokens > self._ring.spare):
            return 0
        return min(self.rows, rows_to_read(position + tokens))

    def is_running(self, position: int, tokens: int) -> bool:
        """Whether the step of `tokens` at `position` is the one that is open."""
        step = self.step
        if step is None:
            return tokens == 1 and self.decode_at == position
        return step.position == position and step.tokens == tokens

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

    @property
    def room(self) -> int:
        """Positions for which `rows` are enough."""
        return self._sequence.capacity if self.rows >= self._row_limit else self.rows

    def rows_of(self, layer: int) -> int:
        """Rows that a layer has allocated."""
        return self._allocated.get(layer, 0)

    def rows_for(self, length: int, is_bare: bool = False) -> int:
        """Rows once `length` positions have been asked for; they never become fewer.

        is_bare: what is not allocated yet does not count.
        """
        least = 0 if is_bare and not self._allocated else self.rows
        return max(least, self._allocated_rows(min(length, self._row_limit)))

    def doubled(self, end: int) -> int:
        """The length to ask for so that `end` positions fit: twice the rows, if they must grow."""
        needed = min(end, self._row_limit)
        return end if needed <= self.rows else grown_rows(self.rows, needed, self._row_limit)

    def reserve(self, length: int) -> None:
        """Ask for enough rows, at once, that `length` positions fit without growing again."""
        rows = self.rows_for(length)
        if rows > self.rows:
            if self.decode_at != NO_POSITION and not self.stop:
                # The running step answers with all rows, of which there are about to be more.
                self.stop = self.end
            self._grow_to(rows)

    def has_grown(self, layer: int, rows: int) -> None:
        """Note that `layer` has the rows that every layer must have; more, after an interrupt."""
        self._allocated[layer] = rows
        if rows > self.rows:
            self._grow_to(rows)
        self._behind.discard(layer)

    def forget(self) -> None:
        """Drop the running step: the sequence was rewound or cleared."""
        self.step = None
        self.row_at = self.decode_at = NO_POSITION
        self.joined.clear()
        self._forget_masks(NO_POSITION)

    def restore(self, allocated: dict[int, int]) -> None:
        """Begin anew with layers that have so many rows each, by their index."""
        self.forget()
        self._allocated = dict(allocated)
        self.rows = max(allocated.values(), default=self.rows)
        self._behind = {layer for layer, rows in allocated.items() if rows < self.rows}

    def _allocated_rows(self, rows: int) -> int:
        return self._ring.whole(rows) if self._ring else rows

    def _grow_to(self, rows: int) -> None:
        # One statement.
        self.rows, self._behind = rows, set(self._allocated)

    def _forget_masks(self, position: int) -> None:
        """Forget the masks of the step before, and that its rows were wanted in slot order."""
        self._mask_position = position
        self._masks: dict[tuple[int, int, bool], mx.array] = {}
        self._slot_order: set[int] = set()

    def _logical_mask(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        """The mask of a step for rows in logical order."""
        narrow = self._narrower(window)
        first = self._first_row(position)
        rows = position + tokens - first
        if rows <= narrow:
            narrow = 0
        if tokens == 1 and not narrow:
            return None
        if not narrow and not as_array:
            return "causal"
        if position != self._mask_position:
            self._forget_masks(position)
        key = (tokens, narrow, False)
        if key not in self._masks:
            self._masks[key] = band(position, tokens, first, rows, narrow)
        return self._masks[key]

    def _first_row(self, position: int) -> int:
        return max(0, position - self.window + 1) if self.window else 0

    def _narrower(self, window: int) -> int:
        own = self.window
        return own if not window or 0 < own < window else window

    def _decode_mask(self, slot: int, window: int) -> mx.array:
        size = self.ring_size
        if window not in self._templates:
            self._templates[window] = ring_template(size, window)
        first = size - 1 - slot
        template = self._templates[window]
        # Through its buffer, which MLX copies faster than it does a NumPy array.
        mask = mx.array(template[:, first : first + size].data)  # type: ignore[arg-type]
        if size * size <= KEPT_MASK_BYTES:
            self._slot_masks[slot, window] = mask
        return mask


def _refuse_mask(tokens: object, window: object, as_array: object) -> NoReturn:
    if not is_integer(tokens, 1, MAX_CAPACITY):
        raise PositionError(f"a mask is for at least one token, got {shortened(tokens)}")
    if not is_integer(window, 0):
        raise ConfigError(f"the window of a mask must be 0 (none) or more, got {shortened(window)}")
    raise ConfigError(f"return_array is True or False, got {shortened(as_array)}")
