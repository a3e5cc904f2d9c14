"""Checked writes: MLX itself would write beyond the last row of a pool.

That corrupts the heap, perhaps unnoticed; here it fails the test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_kvcache.cache.batched
import mlx_kvcache.cache.cells
import mlx_kvcache.cache.sequence  # noqa: F401 (together they load every module that writes rows)


@contextmanager
def checked_writes() -> Iterator[None]:
    """Make a write out of bounds an assertion, wherever the package writes."""
    slice_update, put_along_axis = mx.slice_update, mx.put_along_axis

    def checked_update(source: mx.array, update: mx.array, start: mx.array, axes: Any) -> mx.array:
        assert tuple(axes) == (2,)
        first = start.item()
        assert 0 <= first <= source.shape[2] - update.shape[2], (
            f"{update.shape[2]} rows written at {first} into a pool of {source.shape[2]}"
        )
        return slice_update(source, update, start, axes)

    def checked_put(source: mx.array, index: mx.array, rows: mx.array, axis: int) -> mx.array:
        cells = np.array(index).ravel()
        assert cells.min() >= 0
        assert cells.max() < source.shape[2], f"cell {cells.max()} of {source.shape[2]}"
        return put_along_axis(source, index, rows, axis=axis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "slice_update", checked_update)
        patch.setattr(mx, "put_along_axis", checked_put)
        for name, module in list(sys.modules.items()):
            if name.startswith("mlx_kvcache") and hasattr(module, "slice_update"):
                patch.setattr(module, "slice_update", checked_update)
        yield
