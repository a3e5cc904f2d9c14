"""Attention masks from positions: which rows each query of a step may see."""

from __future__ import annotations

import mlx.core as mx

#: None (every row answered is visible), "causal" (lower-right aligned), or bool [T, S].
Mask = mx.array | str | None

#: No step has this position.
NO_POSITION = -1


class StepMasks:
    """The masks of the layers that share one policy, made once a step and shared.

    `window` and `ring_size` are 0 for flat layers. `slot_order_step` is the (position, tokens)
    for which a mask in the order of a ring's slots was given: the rows of that step must then be
    answered in this order.
    """

    __slots__ = (
        "_key",
        "_mask",
        "_ring_size",
        "_slots",
        "_templates",
        "_window",
        "slot_order_step",
    )

    def __init__(self, window: int, ring_size: int) -> None:
        self._window = window
        self._ring_size = ring_size
        self._key = (NO_POSITION, 0, 0, False)
        self._mask: Mask = None
        self._templates: dict[int, mx.array] = {}
        self._slots: dict[tuple[int, int], mx.array] = {}
        self.slot_order_step = (NO_POSITION, 0)

    def mask(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        """The mask of a step of `tokens` at `position`, which is yet to be written.

        `window` narrows the policy's own (0 = no further). "causal" is answered where it is
        enough and no array is asked for; None for one token that sees all rows answered.
        """
        own = self._window
        narrow = own if not window or 0 < own < window else window
        if tokens == 1:
            end = position + 1
            if own and end > own:
                self.slot_order_step = (position, 1)
                return self._decode_mask(position, narrow)
            if not narrow or end <= narrow:
                return None
        key = (position, tokens, window, as_array)
        if key != self._key:
            self._mask = self._build(position, tokens, narrow, as_array)
            self._key = key
        return self._mask

    def forget(self) -> None:
        """Drop what was remembered of the running step."""
        self._key = (NO_POSITION, 0, 0, False)
        self._mask = None
        self.slot_order_step = (NO_POSITION, 0)

    def _build(self, position: int, tokens: int, window: int, as_array: bool) -> Mask:
        end = position + tokens
        first = max(0, position - self._window + 1) if self._window else 0
        size = self._ring_size
        if size and end - first <= size and first // size != (end - 1) // size:
            self.slot_order_step = (position, tokens)
            return ring_band(position, tokens, size, window)
        if end - first <= window:
            window = 0
        if window or as_array:
            return band(position, tokens, first, end - first, window)
        return "causal"

    def _decode_mask(self, position: int, window: int) -> mx.array:
        size = self._ring_size
        slot = position % size
        mask = self._slots.get((slot, window))
        if mask is None:
            template = self._templates.get(window)
            if template is None:
                template = self._templates[window] = ring_template(size, window)
            mask = template[:, size - 1 - slot : 2 * size - 1 - slot]
            self._slots[slot, window] = mask
        return mask


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
