"""Attention masks from positions: which rows each query of a step may see."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import mlx.core as mx

from mlx_kvcache.errors import ConfigError, PositionError

#: None (every row answered is visible), "causal" (lower-right aligned), or bool [T, S].
Mask = mx.array | str | None

#: No step has this position.
NO_POSITION = -1


class StepMasks:
    """The masks of the layers that share one policy, made once a step and shared.

    `window` and `ring_size` are 0 for flat layers. Which steps were given a mask in the order of
    a ring's slots is remembered: their rows must then be answered in this order.
    """

    __slots__ = (
        "_memo",
        "_memo_position",
        "_ring_size",
        "_slot_masks",
        "_slot_order",
        "_templates",
        "_window",
    )

    def __init__(self, window: int, ring_size: int) -> None:
        self._window = window
        self._ring_size = ring_size
        self._templates: dict[int, mx.array] = {}
        self._slot_masks: dict[tuple[int, int], mx.array] = {}
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepMasks:
        # The decode masks are constants, which a copy may share.
        twin = copy.copy(self)
        twin.forget()
        return twin

    def forget(self) -> None:
        """Drop what was remembered of the running step."""
        self._memo_position = NO_POSITION
        self._memo: dict[tuple[int, int, str], mx.array] = {}
        self._slot_order: set[int] = set()

    def in_slot_order(self, position: int, tokens: int) -> bool:
        """Whether the step of `tokens` at `position` was given a mask in the order of the slots."""
        return self._memo_position == position and tokens in self._slot_order

    def mask(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        """The mask of a step of `tokens` at `position`, which is yet to be written.

        `window` narrows the policy's own (0 = no further). "causal" is answered where it is
        enough and no array is asked for; None for one token that sees all rows answered.
        """
        own = self._window
        size = self._ring_size
        if tokens == 1 and own and position >= own and window >= 0:
            self._at(position)
            self._slot_order.add(1)
            narrow = window if 0 < window < own else own
            mask = self._slot_masks.get((position % size, narrow))
            return self._decode_mask(position % size, narrow) if mask is None else mask
        if window < 0 or type(tokens) is not int or tokens < 1:
            _refuse(tokens, window)
        end = position + tokens
        first = self._first_row(position)
        if size and tokens > 1 and end - first <= size and first // size != (end - 1) // size:
            self._at(position)
            self._slot_order.add(tokens)
            return self._ring_mask(position, tokens, self._narrower(window))
        return self.logical(position, tokens, window, as_array)

    def logical(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        """The mask of the same step for rows in logical order."""
        narrow = self._narrower(window)
        first = self._first_row(position)
        rows = position + tokens - first
        if rows <= narrow:
            narrow = 0
        if tokens == 1 and not narrow:
            return None
        if not narrow and not as_array:
            return "causal"
        self._at(position)
        key = (tokens, narrow, "logical")
        if key not in self._memo:
            self._memo[key] = band(position, tokens, first, rows, narrow)
        return self._memo[key]

    def _at(self, position: int) -> None:
        if position != self._memo_position:
            self._memo_position = position
            self._memo.clear()
            self._slot_order.clear()

    def _first_row(self, position: int) -> int:
        return max(0, position - self._window + 1) if self._window else 0

    def _narrower(self, window: int) -> int:
        own = self._window
        return own if not window or 0 < own < window else window

    def _ring_mask(self, position: int, tokens: int, window: int) -> mx.array:
        key = (tokens, window, "slots")
        if key not in self._memo:
            self._memo[key] = ring_band(position, tokens, self._ring_size, window)
        return self._memo[key]

    def _decode_mask(self, slot: int, window: int) -> mx.array:
        template = self._templates.get(window)
        if template is None:
            template = self._templates[window] = ring_template(self._ring_size, window)
        first = self._ring_size - 1 - slot
        mask = self._slot_masks[slot, window] = template[:, first : first + self._ring_size]
        return mask


def _refuse(tokens: int, window: int) -> NoReturn:
    if type(tokens) is not int or tokens < 1:
        raise PositionError(f"a mask is for at least one token, got {tokens!r}")
    raise ConfigError(f"the window of a mask must be 0 (none) or more, got {window}")


def band(
    query_position: int, query_count: int, row_position: int, row_count: int, window: int
) -> mx.array:
    """Causal mask over rows in logical order, narrowed to `window` positions (0 = no window).

    Queries have positions `query_position ..`, rows `row_position ..`.
    """
    rows = mx.arange(row_position, row_position + row_count)[None]
    queries = mx.arange(query_position, query_position + query_count)[:, None]
    return _visible(queries, rows, window)


def ring_band(query_position: int, query_count: int, size: int, window: int) -> mx.array:
    """Causal mask over the slots of a ring, in their order, after the step was written.

    The slot s of a ring whose newest position is e - 1 answers for the one position in
    [e - size, e) that lies in s. A slot that was never written answers for a negative one.
    """
    newest = query_position + query_count - 1
    slots = mx.arange(size)
    positions = (newest - (newest - slots) % size)[None]
    queries = mx.arange(query_position, query_position + query_count)[:, None]
    return _visible(queries, positions, window) & (positions >= 0)


def ring_template(size: int, window: int) -> mx.array:
    """A mask [1, 2 * size] whose slices are the decode masks of a full ring.

    A token in slot s sees the slots s - window + 1 .. s, counted around the ring. So its mask is
    the columns `size - 1 - s` to `2 * size - 1 - s`: one view instead of a computation each step.
    """
    offsets = mx.arange(2 * size) - (size - 1)
    return (((-offsets) % size) < window)[None]


def _visible(queries: mx.array, positions: mx.array, window: int) -> mx.array:
    mask = positions <= queries
    if window:
        mask = mask & (positions > queries - window)
    return mask
