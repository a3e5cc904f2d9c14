"""Both caches of many sequences answer what a cache for each sequence would answer."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.layout.steps import DeclaredStep

SCALE = 0.21
GEOMETRY = CacheGeometry(
    (
        LayerGeometry(LayerPolicy.flat(), 2, 16, 16),
        LayerGeometry(LayerPolicy.ring(4), 2, 16, 16),
        LayerGeometry(LayerPolicy.flat(), 1, 24, 8),
        LayerGeometry(LayerPolicy.ring(9), 4, 8, 12),
    )
)
QUERY_HEADS = (6, 4, 5, 4)
CACHES = [MLXCellCache, MLXBatchedSequenceCache]


class Pair:
    """A cache of many sequences next to one cache for each."""

    def __init__(self, cache_class: Any, kv_dtype: str | None = None, seed: int = 0) -> None:
        self.config = CacheConfig(2000, kv_dtype, initial_capacity=4, spare=3)
        self.many = cache_class(GEOMETRY, self.config)
        self.single: dict[int, MLXSequenceCache] = {}
        self.random = np.random.default_rng(seed)
        self.change = 0.0

    def new(self) -> int:
        sequence = self.many.new()
        self.single[sequence] = MLXSequenceCache(GEOMETRY, self.config)
        return sequence

    def fork(self, sequence: int, up_to: int) -> int:
        twin = self.many.fork(sequence, up_to)
        self.single[twin] = copy.deepcopy(self.single[sequence])
        self.single[twin].rewind(up_to)
        return twin

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self.random.normal(size=shape).astype(np.float32))

    def step(self, spans: list[tuple[int, int]], sinks: bool = False) -> float:
        """A step through every layer; the largest difference between the two answers."""
        step = self.many.declare_step(spans)
        return max(self._layer(step, layer, sinks) for layer in range(len(GEOMETRY.layers)))

    def _layer(self, step: DeclaredStep, layer: int, sinks: bool) -> float:
        shape = GEOMETRY.layers[layer]
        queries = self.normal(1, QUERY_HEADS[layer], step.tokens, shape.key_dim)
        keys = self.normal(1, shape.kv_heads, step.tokens, shape.key_dim)
        values = self.normal(1, shape.kv_heads, step.tokens, shape.value_dim)
        sink = self.normal(QUERY_HEADS[layer]) if sinks else None
        answer = self.many.attend(layer, queries, keys, values + self.change, SCALE, sink)
        worst = 0.0
        for sequence in step.sequences:
            own = np.flatnonzero(np.array(step.token_sequences) == sequence)
            tokens = mx.array(own.astype(np.int32))
            mask = self.single[sequence].layer(layer).make_mask(len(own))
            rows = (
                self.single[sequence]
                .layer(layer)
                .update_and_fetch(keys[:, :, tokens], values[:, :, tokens])
            )
            wanted = mx.fast.scaled_dot_product_attention(
                queries[:, :, tokens], *rows, scale=SCALE, mask=mask, sinks=sink
            )
            worst = max(worst, mx.abs(answer[:, :, tokens] - wanted).max().item())
        return worst


def run(pair: Pair, steps: int, sinks: bool = False) -> float:
    """Unequal steps over sequences that fork, leave and rewind; the largest difference."""
    worst = 0.0
    for number in range(steps):
        while len(pair.single) < 4:
            pair.new()
        live = sorted(pair.single)
        if number % 7 == 3:
            sequence = int(pair.random.choice(live))
            pair.fork(sequence, pair.many.position(sequence))
        if number % 11 == 5:
            gone = int(pair.random.choice(live))
            pair.many.remove(gone)
            del pair.single[gone]
        if number % 5 == 4:
            sequence = int(pair.random.choice(sorted(pair.single)))
            back = max(0, pair.many.position(sequence) - 1)
            pair.many.rewind(sequence, back)
            pair.single[sequence].rewind(back)
        live = sorted(pair.single)
        if number % 3:
            spans = [(int(s), 1) for s in pair.random.permutation(live)]
        else:
            spans = [
                (int(pair.random.choice(live)), int(pair.random.choice([1, 2, 5, 14])))
                for _ in range(3)
            ]
        worst = max(worst, pair.step(spans, sinks))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("form", ["array", "integer"])
@pytest.mark.parametrize("cache_class", CACHES)
def test_the_answers_are_those_of_separate_caches(
    cache_class: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_KVCACHE_START", form)
    pair = Pair(cache_class)
    assert run(pair, 60) < 1e-5
    assert max(pair.many.position(s) for s in pair.many.sequences) > 30


@pytest.mark.parametrize("cache_class", CACHES)
def test_with_sinks(cache_class: Any) -> None:
    assert run(Pair(cache_class, seed=1), 20, sinks=True) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_class", CACHES)
def test_with_a_narrow_storage_dtype(cache_class: Any, kv_dtype: str) -> None:
    assert run(Pair(cache_class, kv_dtype, seed=2), 30) < 1e-5


@pytest.mark.parametrize("cache_class", CACHES)
def test_the_comparison_is_sensitive(cache_class: Any) -> None:
    pair = Pair(cache_class, seed=3)
    a, b = pair.new(), pair.new()
    assert pair.step([(a, 4), (b, 2)]) < 1e-5
    pair.change = 0.01
    assert pair.step([(a, 1), (b, 1)]) > 1e-4


@pytest.mark.parametrize("cache_class", CACHES)
def test_lengths_that_are_equal_and_lengths_that_are_not(cache_class: Any) -> None:
    pair = Pair(cache_class, seed=4)
    a, b, c = (pair.new() for _ in range(3))
    assert pair.step([(a, 12), (b, 12), (c, 12)]) < 1e-5
    assert pair.step([(a, 1), (b, 1), (c, 1)]) < 1e-5
    assert pair.step([(c, 5)]) < 1e-5
    assert pair.step([(c, 1), (a, 1), (b, 7)]) < 1e-5
    assert pair.step([(b, 1), (a, 3), (b, 1), (c, 1), (b, 1)]) < 1e-5
