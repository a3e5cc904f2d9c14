"""How tokens are chosen: mlx-lm's samplers and penalties, and a random state for each answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import MAX_CAPACITY

#: Takes log-probabilities [1, vocabulary] and answers a token [1], as mlx-lm's samplers do.
Sampler = Callable[[mx.array], mx.array]
#: Takes tokens [N] and logits [1, vocabulary] and answers other logits, as mlx-lm's do.
Processor = Callable[[mx.array, mx.array], mx.array]

_MAX_SEED = 2**64 - 1
#: How far a number may be from 1, so that float32 holds what is computed with it.
_LEAST, _MOST = 1e-30, 1e30
_POSITIVE = f"a positive number, from {_LEAST} to {_MOST:.0e}"
_EITHER = f"a number from {-_MOST:.0e} to {_MOST:.0e}"
#: The least and the most that a number of `Sampling` may be, and how that is said. All but top_p
#: may be 0.
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "temp": (_LEAST, _MOST, f"0 (greedy) or {_POSITIVE}"),
    "top_p": (_LEAST, 1, f"from {_LEAST} to 1"),
    "min_p": (0, 1, "between 0 and 1"),
    "xtc_probability": (0, 1, "between 0 and 1"),
    "xtc_threshold": (0, 0.5, "between 0 and 0.5"),
    "repetition_penalty": (_LEAST, _MOST, f"{_POSITIVE}, or 0 or 1 (none)"),
    "presence_penalty": (-_MOST, _MOST, _EITHER),
    "frequency_penalty": (-_MOST, _MOST, _EITHER),
}
#: The least and the most that an integer of `Sampling` may be.
_INTEGERS = {
    "top_k": (0, MAX_CAPACITY),
    "min_tokens_to_keep": (1, MAX_CAPACITY),
    "repetition_context_size": (0, MAX_CAPACITY),
    "presence_context_size": (0, MAX_CAPACITY),
    "frequency_context_size": (0, MAX_CAPACITY),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedy at temperature 0; a seed makes a random choice repeatable.

    Everything but the penalties is for temperatures above 0. The names are mlx-lm's, and so is
    what they mean. A penalty looks at so many of the newest tokens, the prompt's included; a
    context size of 0 stands for all of them. xtc_special_tokens: what XTC never takes away.
    """

    temp: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20


def check_sampling(sampling: Sampling) -> None:
    """Raise `ConfigError`, which begins with the field's name, for a value that cannot be."""
    for name, (least, most, said) in _BOUNDS.items():
        value = getattr(sampling, name)
        is_none = value == 0 and name != "top_p"
        if not _is_number(value) or not (is_none or least <= value <= most):
            raise ConfigError(f"{name} must be {said}, got {shortened(value)}")
    for name, (lowest, highest) in _INTEGERS.items():
        value = getattr(sampling, name)
        if not is_integer(value, lowest, highest):
            raise ConfigError(
                f"{name} must be an integer from {lowest} to {highest}, got {shortened(value)}"
            )
    seed = sampling.seed
    if seed is not None and not is_integer(seed, 0, _MAX_SEED):
        raise ConfigError(f"seed must be an integer from 0 to {_MAX_SEED}, got {shortened(seed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token of each row."""
    return mx.argmax(logprobs, axis=-1)


def sampler_of(sampling: Sampling) -> Sampler:
    """mlx-lm's sampler for these choices; limits above the vocabulary let all of it through."""
    if not sampling.temp:
        return greedy
    from mlx_lm.sample_utils import make_sampler

    @cache
    def of_vocabulary(size: int) -> Any:
        return make_sampler(
            sampling.temp,
            sampling.top_p,
            sampling.min_p,
            min(sampling.min_tokens_to_keep, size),
            sampling.top_k if sampling.top_k < size else 0,
            sampling.xtc_probability,
            sampling.xtc_threshold,
            list(sampling.xtc_special_tokens),
        )

    def sampler(logprobs: mx.array) -> mx.array:
        token: mx.array = of_vocabulary(logprobs.shape[-1])(logprobs.astype(mx.float32))
        return token

    return sampler


def processors_of(sampling: Sampling) -> list[Processor]:
    """mlx-lm's logits processors for the penalties, in float32; none where nothing is penalized."""
    if not _penalties(sampling):
        return []
    from mlx_lm.sample_utils import make_logits_processors

    processors: Any = make_logits_processors(
        None,
        # A factor of 1 changes nothing.
        None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        sampling.repetition_context_size,
        sampling.presence_penalty,
        sampling.presence_context_size,
        sampling.frequency_penalty,
        sampling.frequency_context_size,
    )
    return [_widened, *processors]


def _widened(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.float32)


def _penalties(sampling: Sampling) -> list[int]:
    """The context size of each penalty that is in use."""
    found = []
    if sampling.repetition_penalty not in (0, 1):
        found.append(sampling.repetition_context_size)
    if sampling.presence_penalty:
        found.append(sampling.presence_context_size)
    if sampling.frequency_penalty:
        found.append(sampling.frequency_context_size)
    return found


class Chooser:
    """Chooses the next token from logits [1, vocabulary]: penalties first, then the sampler.

    sampler: in place of mlx-lm's for `sampling`. is_greedy: whether this is plain argmax.
    """

    def __init__(self, sampling: Sampling, sampler: Sampler | None = None) -> None:
        self._sampler = sampler or sampler_of(sampling)
        self._processors = processors_of(sampling)
        sizes = _penalties(sampling)
        self._context = 0 if 0 in sizes else max(sizes, default=0)
        self.is_greedy = self._sampler is greedy and not self._processors

    def choose(self, logits: mx.array, tokens: Sequence[int]) -> mx.array:
        """The token [1] that follows `tokens`; lazy."""
        return self.after(tokens)(logits)

    def after(self, tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
        """Chooses one token after another, each following `tokens` and those chosen before it."""
        if not self._processors:
            return lambda logits: self._sampler(_logprobs(logits))
        recent = mx.array(list(tokens[-self._context :]), mx.int32)

        def choose(logits: mx.array) -> mx.array:
            nonlocal recent
            for processor in self._processors:
                logits = processor(recent, logits)
            token = self._sampler(_logprobs(logits))
            recent = mx.concatenate([recent, token.astype(mx.int32)])[-self._context :]
            return token

        return choose


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class RandomState:
    """A random state of its own for one answer, in terms of MLX's, which is one for a thread.

    MLX's state can be set by a seed only, and the state is the seed in two words. Reading it waits
    for what was drawn, so whoever draws keeps MLX's state until somebody else takes it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @classmethod
    def of(cls, seed: int | None) -> RandomState:
        """The state that `mx.random.seed(seed)` gives; any state for None."""
        return cls(int.from_bytes(os.urandom(8), "little") if seed is None else seed)

    def copy(self) -> RandomState:
        """A state that draws the same from here on, and goes its own way."""
        return RandomState(_current_seed() if _IN_USE.state is self else self._seed)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from this state, and put the thread's own back.

        What was drawn counts also when the body raises. A body that lets others run in between
        takes the state again after that: what they draw from MLX's own state meanwhile is drawn
        from this one.
        """
        self.take()
        try:
            yield
        finally:
            if _IN_USE.state is self:
                _IN_USE.state = None
                self._seed = _current_seed()
                mx.random.seed(_IN_USE.own)

    def take(self) -> None:
        """Make this the state that this thread draws from, and keep that of whoever did before."""
        other = _IN_USE.state
        if other is self:
            return
        seed = _current_seed()
        if other is None:
            _IN_USE.own = seed
        else:
            other._seed = seed
        _IN_USE.state = self
        mx.random.seed(self._seed)


class _InUse(threading.local):
    """Whose state MLX's is in this thread, None for the thread's own, which else is kept here."""

    state: RandomState | None = None
    own: int = 0


_IN_USE = _InUse()


def _current_seed() -> int:
    state: Any = mx.random.state
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


def sampling_facts(sampling: Sampling) -> dict[str, Any]:
    """The choices by their names, for a report."""
    return {
        field.name: getattr(sampling, field.name)
        for field in fields(sampling)
        if field.name != "xtc_special_tokens"
    }
