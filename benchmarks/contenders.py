"""The two caches of a benchmark without a model, side by side: ours and mlx-lm's own classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_kvcache import CacheConfig, CacheGeometry, LayerGeometry, LayerPolicy, MLXSequenceCache
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer


@dataclass(frozen=True)
class Shape:
    """Layers of [1, heads, rows, dim] keys and as many values."""

    layers: int
    heads: int
    dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one layer: its key and its value."""
        itemsize: int = getattr(mx, self.dtype).size
        return 2 * self.heads * self.dim * itemsize

    def rows(self, count: int) -> mx.array:
        """`count` new rows [1, heads, count, dim] that take no memory of their own."""
        one = mx.array(1.0, getattr(mx, self.dtype))
        return mx.broadcast_to(one, (1, self.heads, count, self.dim))

    def tokens(self) -> list[mx.array]:
        """One new row [1, heads, 1, dim] for each layer, evaluated and all different."""
        shape = (1, self.heads, 1, self.dim)
        rows = [mx.random.normal(shape, getattr(mx, self.dtype)) for _ in range(self.layers)]
        mx.eval(rows)
        return rows


def our_cache(shape: Shape, window: int = 0, **config: Any) -> MLXSequenceCache:
    """Our cache with the layer objects that mlx-lm's models are given; window 0 = flat."""
    layer = LayerGeometry(LayerPolicy.from_window(window), shape.heads, shape.dim, shape.dim)
    geometry = CacheGeometry((layer,) * shape.layers)
    return MLXSequenceCache(geometry, CacheConfig(**config), MLXLMLayer)


def their_layers(shape: Shape, window: int = 0) -> list[Any]:
    """What mlx-lm makes for the same layers; window 0 = flat."""
    return [RotatingKVCache(window) if window else KVCache() for _ in range(shape.layers)]


def fill(layers: Sequence[Any], shape: Shape, count: int) -> None:
    """Write `count` rows into every layer in one step, as a prompt does, and evaluate them."""
    rows = shape.rows(count)
    for layer in layers:
        layer.update_and_fetch(rows, rows)
        evaluate([layer])


def evaluate(layers: Sequence[Any]) -> None:
    """Run everything that is still to be computed in these layers."""
    mx.eval([(layer.keys, layer.values) for layer in layers])


def allocated_rows(layer: Any) -> int:
    """Rows of the layer's buffer, the unused ones included."""
    return 0 if layer.keys is None else int(layer.keys.shape[2])
