"""Attention masks from positions: which rows each query of a step may see.

A position may be an array as well, of one integer: a compiled step has no number to give.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

#: None (every row answered is visible), "causal" (lower-right aligned), or bool [T, S].
Mask = mx.array | str | None
Position = int | mx.array


def band(
    query_position: Position,
    query_count: int,
    row_position: Position,
    row_count: int,
    window: int,
) -> mx.array:
    """Causal mask over rows in logical order, narrowed to `window` positions (0 = no window).

    Queries have positions `query_position ..`, rows `row_position ..`.
    """
    rows = row_position + mx.arange(row_count)[None]
    queries = query_position + mx.arange(query_count)[:, None]
    return _visible(queries, rows, window)


def ring_band(query_position: Position, query_count: int, size: int, window: int) -> mx.array:
    """Causal mask over the slots of a ring, in their order, after the step was written.

    The slot s of a ring whose newest position is e - 1 answers for the one position in
    [e - size, e) that lies in s. A slot that was never written answers for a negative one.
    """
    newest = query_position + query_count - 1
    slots = mx.arange(size)
    positions = (newest - (newest - slots) % size)[None]
    queries = query_position + mx.arange(query_count)[:, None]
    return _visible(queries, positions, window) & (positions >= 0)


def ring_template(size: int, window: int) -> NDArray[np.bool_]:
    """A mask [1, 2 * size] whose slices are the decode masks of a full ring.

    A token in slot s sees the slots s - window + 1 .. s, counted around the ring. So its mask is
    the columns `size - 1 - s` to `2 * size - 1 - s`. On the host, where it belongs to no stream.
    """
    offsets = np.arange(2 * size) - (size - 1)
    template: NDArray[np.bool_] = ((-offsets) % size < window)[None]
    return template


def _visible(queries: mx.array, positions: mx.array, window: int) -> mx.array:
    mask = positions <= queries
    if window:
        mask = mask & (positions > queries - window)
    return mask
