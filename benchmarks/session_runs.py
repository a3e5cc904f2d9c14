"""Runs many prompts at once, on our engine and on mlx-lm's BatchGenerator, and times both."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_kvcache import CacheConfig, CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.engine import Engine


@dataclass(frozen=True)
class Work:
    """Prompts of unequal length that may begin with a common prefix, and the tokens to produce."""

    prefix: list[int]
    prompts: list[list[int]]
    tokens: int
    step_tokens: int

    @property
    def positions(self) -> int:
        """Positions that all sequences hold at the end, the prefix once for each."""
        own = sum(map(len, self.prompts)) + len(self.prompts) * self.tokens
        return own + (len(self.prompts) + 1) * len(self.prefix)


@dataclass(frozen=True)
class Run:
    """One run. Seconds and bytes.

    step: the median step in which all sequences got a token and no prompt was read. whole: from
    the first submission to the last token. peak: what MLX held at most, less what it held before.
    """

    answers: list[list[int]]
    step: float
    whole: float
    peak: int

    @property
    def decode_rate(self) -> float:
        """Tokens a second when all sequences decode."""
        return len(self.answers) / self.step

    @property
    def whole_rate(self) -> float:
        """Produced tokens a second, the prompts' reading included."""
        return sum(map(len, self.answers)) / self.whole


def make_work(tokenizer: Any, batch: int, prompt: int, tokens: int, prefix: int, step: int) -> Work:
    """`batch` prompts of half to one and a half times `prompt` random tokens."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in special]
    draw = random.Random(batch)
    lengths = [draw.randint(max(1, prompt // 2), prompt + prompt // 2) for _ in range(batch)]
    prompts = [draw.choices(ordinary, k=length) for length in lengths]
    return Work(draw.choices(ordinary, k=prefix), prompts, tokens, step)


def ours(engine_of: Callable[[Work], Engine], work: Work) -> Run:
    """The work on our engine: the prefix is read once, and each prompt is a fork of it.

    The engine tries its model when it is made, once; that is not counted.
    """
    engine = engine_of(work)

    def body(steps: list[float]) -> list[list[int]]:
        parent = None
        if work.prefix:
            parent = engine.open()
            parent.submit(work.prefix, max_tokens=0)
        requests = [
            engine.submit(prompt, max_tokens=work.tokens, parent=parent) for prompt in work.prompts
        ]
        while not engine.is_idle:
            passes = engine.metrics.prefill_passes
            start = perf_counter()
            events = engine.step()
            if len(events) == len(requests) and engine.metrics.prefill_passes == passes:
                steps.append(perf_counter() - start)
        return [request.tokens for request in requests]

    return _timed(body)


def our_engine(model: Any, kind: str) -> Callable[[Work], Engine]:
    """An engine for one piece of work, with room for all of it."""

    def make(work: Work) -> Engine:
        return Engine(
            model,
            work.positions,
            kind,
            max_active=len(work.prompts),
            step_tokens=max(work.step_tokens, len(work.prompts)),
        )

    return make


def theirs(model: Any, work: Work) -> Run:
    """The work on mlx-lm's BatchGenerator: the prefix is read once, each prompt gets a copy."""

    def body(steps: list[float]) -> list[list[int]]:
        caches = None
        if work.prefix:
            prefix = make_prompt_cache(model)
            for begin in range(0, len(work.prefix), work.step_tokens):
                part = work.prefix[begin : begin + work.step_tokens]
                model(mx.array([part]), cache=prefix)
                mx.eval([layer.state for layer in prefix])
            caches = [copy.deepcopy(prefix) for _ in work.prompts]
        count = len(work.prompts)
        generator = BatchGenerator(
            model,
            max_tokens=work.tokens,
            completion_batch_size=max(count, 8),
            prefill_step_size=work.step_tokens,
        )
        numbers = generator.insert(work.prompts, caches=caches)
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        left = count
        while left:
            start = perf_counter()
            prompts, responses = generator.next()
            if len(responses) == count and not prompts:
                steps.append(perf_counter() - start)
            for response in responses:
                answers[response.uid].append(response.token)
                left -= response.finish_reason is not None
        generator.close()
        return list(answers.values())

    return _timed(body)


def _timed(body: Callable[[list[float]], list[list[int]]]) -> Run:
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    steps: list[float] = []
    start = perf_counter()
    answers = body(steps)
    whole = perf_counter() - start
    if not steps:
        raise ValueError("the sequences never decoded all at once; give more tokens")
    return Run(answers, sorted(steps)[len(steps) // 2], whole, mx.get_peak_memory() - before)


@dataclass(frozen=True)
class Fork:
    """A fork of a sequence: seconds, bytes it took, and bytes once both had one more token."""

    seconds: float
    taken: int
    written: int


@dataclass(frozen=True)
class Rows:
    """Layers of flat float16 rows, such as those of the model at hand."""

    layers: int
    heads: int
    dim: int

    def new(self, count: int) -> tuple[mx.array, mx.array]:
        """`count` new rows of one layer, keys and values."""
        shape = (1, self.heads, count, self.dim)
        return mx.random.normal(shape, mx.float16), mx.random.normal(shape, mx.float16)


def our_fork(rows: Rows, kind: str, length: int) -> Fork:
    """A fork of a sequence of `length` positions in one of our caches."""
    layer = LayerGeometry(LayerPolicy.flat(), rows.heads, rows.dim, rows.dim)
    geometry = CacheGeometry((layer,) * rows.layers)
    make = MLXCellCache if kind == "cell" else MLXBatchedSequenceCache
    cache = make(geometry, CacheConfig(capacity=4 * length, initial_capacity=2 * length))
    first = cache.new()
    _write(cache, rows, first, length)

    def write(twin: int) -> None:
        for sequence in (first, twin):
            _write(cache, rows, sequence, 1)

    return _forked(lambda: cache.fork(first), write, lambda _: None)


def _write(cache: Any, rows: Rows, sequence: int, count: int) -> None:
    cache.declare_step([(sequence, count)])
    for layer in range(rows.layers):
        cache.update_and_fetch(layer, *rows.new(count))
    mx.eval(cache.state)


def their_fork(rows: Rows, length: int) -> Fork:
    """`copy.deepcopy` of as many layers of mlx-lm's KVCache."""
    layers = [KVCache() for _ in range(rows.layers)]

    def write(cache: Sequence[KVCache], count: int) -> None:
        for layer in cache:
            layer.update_and_fetch(*rows.new(count))
        evaluate(cache)

    def evaluate(cache: Sequence[KVCache]) -> None:
        mx.eval([(layer.keys, layer.values) for layer in cache])

    def both(twin: Sequence[KVCache]) -> None:
        write(layers, 1)
        write(twin, 1)

    write(layers, length)
    return _forked(lambda: copy.deepcopy(layers), both, evaluate)


def _forked(
    fork: Callable[[], Any], write: Callable[[Any], None], settle: Callable[[Any], None]
) -> Fork:
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    start = perf_counter()
    twin = fork()
    settle(twin)
    seconds = perf_counter() - start
    taken = mx.get_active_memory() - before
    write(twin)
    return Fork(seconds, taken, mx.get_active_memory() - before)
