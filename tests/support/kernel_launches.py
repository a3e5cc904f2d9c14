"""Launches whose programs nearly every test needs, so that they can be compiled side by side."""

from __future__ import annotations

import mlx.core as mx

from mlx_kvcache.store import metal
from mlx_kvcache.store.metal import Launch
from tests.support.kernel_arrays import DTYPES

#: A head dim that is moved in wide packs, and one that is not.
DIMS = (16, 9)
QUANTIZED = [(group, bits) for group in (32, 64, 128) for bits in (4, 8)]


def moving(dtype: mx.Dtype, dim: int) -> list[Launch]:
    """The kernels that move rows, as compiled for a dtype and a head dim."""
    ring, rows = mx.zeros((1, 1, 8, dim), dtype), mx.zeros((1, 1, 8, dim), dtype)
    cells = mx.arange(8)
    return [
        metal.ring_write(ring, rows, 0),
        metal.ring_join(ring, rows, 0, 8),
        metal.cell_scatter(ring, rows, cells),
        metal.cell_gather(ring, cells),
    ]


def quantizing(dtype: mx.Dtype, group: int, bits: int) -> Launch:
    """The quantizing kernel by the CPU's rule."""
    rows = mx.zeros((2, 4, 2, 2 * group), dtype)
    ring = mx.quantize(rows, group_size=group, bits=bits)
    return metal.ring_write_quantized(*ring, rows, 0, cpu_rule=True)


def launches() -> list[Launch]:
    """All of them."""
    return [
        *(launch for dtype in DTYPES for dim in DIMS for launch in moving(dtype, dim)),
        *(quantizing(dtype, *form) for dtype in DTYPES for form in QUANTIZED),
    ]
