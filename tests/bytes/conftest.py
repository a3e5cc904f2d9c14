"""Byte tests run with every array-start write checked, since MLX itself does not check them.

A write beyond the last row would corrupt the heap, perhaps unnoticed; here it fails the test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

import mlx_kvcache.cache.sequence  # noqa: F401 (loads every module that writes rows)


def checked(write: Any) -> Any:
    """`slice_update` that refuses what MLX would write out of bounds."""

    def slice_update(source: mx.array, update: mx.array, start: mx.array, axes: Any) -> mx.array:
        assert tuple(axes) == (2,)
        row = start.item()
        assert row >= 0, f"written before the first row: {row}"
        assert row + update.shape[2] <= source.shape[2], (
            f"rows {row} to {row + update.shape[2]} written into a pool of {source.shape[2]}"
        )
        return write(source, update, start, axes)

    return slice_update


@pytest.fixture(scope="module", autouse=True)
def bounds_are_checked() -> Iterator[None]:
    """Replace `slice_update` wherever the package has imported it."""
    original = mx.slice_update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "slice_update", checked(original))
        for name, module in list(sys.modules.items()):
            if name.startswith("mlx_kvcache") and hasattr(module, "slice_update"):
                patch.setattr(module, "slice_update", checked(original))
        yield
