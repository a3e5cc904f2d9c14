"""The log-probabilities of an answer's tokens, and of those that were likely in their place."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log-probability, and the likeliest tokens with theirs.

    They are what the sampler chose from: after the penalties, before temperature and limits.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass
class Logprobs:
    """Collects the log-probabilities of an answer. count: how many of the likeliest to keep."""

    count: int
    _tokens: list[int] = field(default_factory=list)
    _arrays: list[tuple[mx.array, mx.array, mx.array]] = field(default_factory=list)

    def add(self, token: int, logprobs: mx.array) -> None:
        """Keep what belongs to a token, of log-probabilities [vocabulary]. Waits for nothing."""
        values = logprobs.astype(mx.float32)
        order = mx.argsort(-values)[: self.count]
        kept = (values[token], order, values[order])
        # Otherwise each would hold on to the log-probabilities of the whole vocabulary.
        mx.async_eval(*kept)  # type: ignore[no-untyped-call]
        self._tokens.append(token)
        self._arrays.append(kept)

    def found(self) -> list[TokenLogprob]:
        """Those of all tokens that were added, in their order."""
        return [
            TokenLogprob(
                token,
                float(value.item()),  # type: ignore[arg-type]
                tuple(zip(order.tolist(), values.tolist(), strict=True)),  # type: ignore[arg-type]
            )
            for token, (value, order, values) in zip(self._tokens, self._arrays, strict=True)
        ]
