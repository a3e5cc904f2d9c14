"""What an array holds, for comparison: its numbers, its bits, and what a mask lets see."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def numbers(array: mx.array) -> np.ndarray:
    """The numbers of an array as float32, which holds those of every storage dtype exactly."""
    return np.array(array.astype(mx.float32))


def bits(array: mx.array) -> np.ndarray:
    """The stored bits, as unsigned integers of the element's size."""
    if array.dtype == mx.bfloat16:
        # NumPy has no such numbers.
        return np.array(array.view(mx.uint16))
    return np.array(array).view(f"u{array.dtype.size}")


def raw(array: mx.array | None) -> tuple[Any, ...] | None:
    """Shape, dtype and bytes of an array."""
    if array is None:
        return None
    contents = bits(array).tobytes() if array.size else b""
    return tuple(array.shape), str(array.dtype), contents


def visible_rows(mask: Any, query: int, queries: int, rows: int) -> np.ndarray:
    """Which of `rows` the query may see, as attention reads the mask."""
    if mask is None:
        return np.ones(rows, bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.arange(rows) <= rows - queries + query
    assert mask.dtype == mx.bool_
    assert mask.shape == (queries, rows), f"mask {mask.shape} for {queries} queries, {rows} rows"
    return np.array(mask)[query]
