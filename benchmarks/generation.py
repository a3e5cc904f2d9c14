"""Measures one model under either cache: whole generations, and decode steps in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
from common import alternate
from mlx_lm.generate import generate_step
from model_caches import CacheMaker, Held, held


@dataclass(frozen=True)
class Side:
    """A model as one contender runs it, and what makes its caches."""

    model: Any
    make_cache: CacheMaker


def random_prompt(tokenizer: Any, count: int, seed: int) -> list[int]:
    """`count` ids of ordinary tokens, drawn with a fixed seed."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in special]
    return random.Random(seed).choices(ordinary, k=count)


@dataclass(frozen=True)
class Generation:
    """One greedy generation. Times in seconds.

    first: from the call to the first token. decode: from the first token to the last.
    peak: the most bytes that MLX held at once, the weights included.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    first: float
    decode: float
    held: Held
    peak: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, the first new token's sampling included."""
        return self.prompt_tokens / self.first

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.tokens) - 1) / self.decode


def generate(side: Side, prompt: Sequence[int], tokens: int, prefill_step: int) -> Generation:
    """Generate `tokens` tokens (at least 2) with mlx-lm's own loop on a fresh cache."""
    cache = side.make_cache()
    ids = mx.array(list(prompt))
    mx.eval(ids)
    mx.clear_cache()
    mx.reset_peak_memory()
    answer: list[int] = []
    start = first = last = perf_counter()
    steps = generate_step(
        ids, side.model, max_tokens=tokens, prompt_cache=cache, prefill_step_size=prefill_step
    )
    for token, _ in steps:
        last = perf_counter()
        if not answer:
            first = last
        answer.append(token)
    # The loop has one step more in flight; it must not run into the next measurement.
    mx.eval([entry.state for entry in cache])
    return Generation(
        len(prompt),
        tuple(answer),
        first - start,
        last - first,
        held(cache),
        mx.get_peak_memory(),
    )


def decode_steps(
    sides: Sequence[Side], prompt: Sequence[int], tokens: int, prefill_step: int
) -> list[list[tuple[float, float]]]:
    """Decode steps of each side in turns: (seconds to build one, seconds in all), by side.

    A step is built as mlx-lm's loop builds it (model, log-probabilities, greedy choice) and then
    evaluated before the next, so that building and running do not overlap.
    """
    steppers = [_stepper(side.model, side.make_cache(), prompt, prefill_step) for side in sides]
    return alternate(tokens, steppers)


def _stepper(
    model: Any, cache: list[Any], prompt: Sequence[int], prefill_step: int
) -> Callable[[], tuple[float, float]]:
    for start in range(0, len(prompt) - 1, prefill_step):
        model(mx.array([prompt[start : min(start + prefill_step, len(prompt) - 1)]]), cache=cache)
        mx.eval([entry.state for entry in cache])
    token = mx.array([prompt[-1]])

    def step() -> tuple[float, float]:
        nonlocal token
        start = perf_counter()
        logits = model(token[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        following = mx.argmax(logprobs, axis=-1)
        built = perf_counter() - start
        mx.eval(following, logprobs)
        took = perf_counter() - start
        token = following
        return built, took

    return step
