"""How tokens are chosen: mlx-lm's samplers, with a random state for each answer that has a seed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_kvcache.errors import ConfigError

#: Takes log-probabilities [1, vocabulary] and answers a token [1], as mlx-lm's samplers do.
Sampler = Callable[[mx.array], mx.array]

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedy at temperature 0; a seed makes a random choice repeatable."""

    temp: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


def sampler_of(sampling: Sampling) -> Sampler:
    """mlx-lm's sampler for these choices."""
    if not sampling.temp:
        return greedy
    from mlx_lm.sample_utils import make_sampler

    sampler: Any = make_sampler(sampling.temp, sampling.top_p)
    return sampler  # type: ignore[no-any-return]


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token of each row."""
    return mx.argmax(logprobs, axis=-1)


def check_sampling(sampling: Sampling) -> None:
    """Raise `ConfigError` for a temperature, probability or seed that cannot be."""
    temp, top_p, seed = sampling.temp, sampling.top_p, sampling.seed
    if not (math.isfinite(temp) and temp >= 0):
        raise ConfigError(f"temp must be 0 (greedy) or a positive number, got {temp!r}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED
    ):
        raise ConfigError(f"seed must be an integer from 0 to {_MAX_SEED}, got {seed!r}")


class RandomState:
    """A random state of its own for one request, in terms of MLX's, which is one for a thread.

    MLX's state can be set by a seed only, and the state is the seed in two words.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @classmethod
    def of(cls, seed: int | None) -> RandomState:
        """The state that `mx.random.seed(seed)` gives; any state for None."""
        return cls(int.from_bytes(os.urandom(8), "little") if seed is None else seed)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from this state, and put the thread's own back."""
        outer = _current_seed()
        mx.random.seed(self._seed)
        try:
            yield
            self._seed = _current_seed()
        finally:
            mx.random.seed(outer)


def _current_seed() -> int:
    state: Any = mx.random.state
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)
