"""What `update_and_attend` must answer, from its definition alone: numpy, float64, no cache.

Slow and simple on purpose. It keeps every row ever written, and decides by comparing positions
what each query sees, so it shares no code and no idea with the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_kvcache.facts.geometry import CacheGeometry

Array = np.ndarray[Any, Any]


class AttentionOracle:
    """The history of every cache layer, and attention over it.

    kv_dtype: rows are rounded to it when they are written, as the cache stores them; None or
    "float32" keeps them as they are given.
    """

    def __init__(self, geometry: CacheGeometry, kv_dtype: str | None = None) -> None:
        self.geometry = geometry
        self.kv_dtype = kv_dtype
        self._rows: list[tuple[Array, Array] | None] = [None] * len(geometry.layers)

    def step(
        self,
        layer: int,
        queries: Array,
        keys: Array,
        values: Array,
        scale: float,
        *,
        sinks: Array | None = None,
        softcap: float | None = None,
    ) -> Array:
        """Append keys [B, H, T, D] and values [B, H, T, Dv], and answer queries [B, Hq, T, D]."""
        self._append(layer, stored(keys, self.kv_dtype), stored(values, self.kv_dtype))
        rows = self._rows[layer]
        assert rows is not None, "the step was just appended"
        tokens = queries.shape[2]
        start = rows[0].shape[2] - tokens
        seen = visible(start, tokens, self.geometry.layers[layer].policy.window)
        return attention(queries, *rows, seen, scale, sinks=sinks, softcap=softcap)

    def rewind(self, position: int) -> None:
        """Forget the rows from `position` on, in all layers."""
        self._rows = [
            None if rows is None else (rows[0][:, :, :position], rows[1][:, :, :position])
            for rows in self._rows
        ]

    def _append(self, layer: int, keys: Array, values: Array) -> None:
        held = self._rows[layer]
        if held is not None:
            keys = np.concatenate([held[0], keys], axis=2)
            values = np.concatenate([held[1], values], axis=2)
        self._rows[layer] = keys, values


def visible(start: int, tokens: int, window: int) -> Array:
    """Which of the positions 0 .. start + tokens - 1 each query sees: bool [T, start + T].

    The query at position p sees p and what is before it; with a window, only its newest positions.
    """
    queries = np.arange(start, start + tokens)[:, None]
    rows = np.arange(start + tokens)[None]
    seen = rows <= queries
    return seen & (rows > queries - window) if window else seen


def attention(
    queries: Array,
    keys: Array,
    values: Array,
    seen: Array,
    scale: float,
    *,
    sinks: Array | None = None,
    softcap: float | None = None,
) -> Array:
    """Attention head by head: queries [B, Hq, T, D], rows [B, H, S, D] and [B, H, S, Dv]."""
    batch, query_heads, tokens, _ = queries.shape
    group = query_heads // keys.shape[1]
    out = np.zeros((batch, query_heads, tokens, values.shape[3]))
    for sequence in range(batch):
        for head in range(query_heads):
            key_rows = keys[sequence, head // group].astype(np.float64)
            value_rows = values[sequence, head // group].astype(np.float64)
            scores = queries[sequence, head].astype(np.float64) @ key_rows.T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else float(sinks[head])
            out[sequence, head] = _weights(scores, seen, sink) @ value_rows
    return out


def _weights(scores: Array, seen: Array, sink: float) -> Array:
    scores = np.where(seen, scores, -np.inf)
    highest = np.maximum(scores.max(axis=1, keepdims=True), sink)
    weights: Array = np.exp(scores - highest)
    weights /= weights.sum(axis=1, keepdims=True) + np.exp(sink - highest)
    return weights


def stored(rows: Array, kv_dtype: str | None) -> Array:
    """The float32 numbers that remain of `rows` in a storage dtype."""
    single = rows.astype(np.float32)
    if kv_dtype == "float16":
        return single.astype(np.float16).astype(np.float32)
    if kv_dtype == "bfloat16":
        # numpy has no bfloat16: keep the upper half of the bits, rounded to the nearest even.
        bits = single.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        single = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return single
