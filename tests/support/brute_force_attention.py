"""Attention by the definition, one query and one row at a time, in plain numpy float64.

Rows are kept in dictionaries by position. Nothing here is shared with the package, nor with
`AttentionOracle`, which computes with whole arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np


def numbers(array: mx.array) -> np.ndarray:
    """The numbers of an array as float64; every storage dtype is held exactly."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


@dataclass
class History:
    """The rows of one layer by position, as they were stored in `dtype`."""

    window: int
    dtype: mx.Dtype | None = None
    keys: dict[int, np.ndarray] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)

    def write(self, position: int, keys: mx.array, values: mx.array) -> None:
        for rows, store in ((keys, self.keys), (values, self.values)):
            kept = numbers(rows if self.dtype is None else rows.astype(self.dtype))
            for token in range(kept.shape[2]):
                assert position + token not in store, "a position was written twice"
                store[position + token] = kept[:, :, token]

    def rewind(self, position: int) -> None:
        for store in (self.keys, self.values):
            for held in [place for place in store if place >= position]:
                del store[held]

    def seen_by(self, position: int) -> list[int]:
        """The positions that the query at `position` sees."""
        oldest = position - self.window + 1 if self.window else 0
        return [place for place in sorted(self.keys) if oldest <= place <= position]

    def attend(
        self,
        position: int,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> np.ndarray:
        """The answer [B, Hq, T, Dv] to the step of these queries at `position`."""
        asked = numbers(queries)
        sink = None if sinks is None else numbers(sinks)
        batch, heads, tokens, _ = asked.shape
        some = next(iter(self.values.values()))
        out = np.zeros((batch, heads, tokens, some.shape[2]))
        for token in range(tokens):
            for sequence in range(batch):
                for head in range(heads):
                    group = head // (heads // some.shape[1])
                    out[sequence, head, token] = self._one(
                        position + token,
                        asked[sequence, head, token],
                        (sequence, group),
                        scale,
                        None if sink is None else float(sink[head]),
                        softcap,
                    )
        return out

    def _one(
        self,
        position: int,
        query: np.ndarray,
        where: tuple[int, int],
        scale: float,
        sink: float | None,
        softcap: float | None,
    ) -> np.ndarray:
        places = self.seen_by(position)
        assert places[-1] == position, "a query must see itself"
        scores = [scale * float(query @ self.keys[place][where]) for place in places]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        top = max(scores if sink is None else [*scores, sink])
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
        return sum(
            (weight / total) * self.values[place][where]
            for weight, place in zip(weights, places, strict=True)
        )
