"""A decode step whose position is an array: one compiled graph serves every position."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache import CacheConfig, MLXSequenceCache
from mlx_kvcache.cache.masks import band, ring_band
from mlx_kvcache.layout import Run
from mlx_kvcache.store.rows import DenseRows, Placement
from tests.support.sequence_oracle import simple_geometry

WINDOW, SPARE, ROWS, SCALE = 5, 3, 16, 0.4
SIZE = WINDOW + SPARE - 1


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_compiled_step_writes_and_sees_what_the_cache_does(window: int) -> None:
    geometry = simple_geometry(window)
    facts = geometry.layers[0]
    random = np.random.default_rng(window)
    rows = SIZE if window else ROWS
    cache = MLXSequenceCache(geometry, CacheConfig(ROWS, initial_capacity=ROWS, spare=SPARE))
    store = DenseRows()
    key_shape = (1, facts.kv_heads, rows, facts.key_dim)
    value_shape = (1, facts.kv_heads, rows, facts.value_dim)
    store.allocate(key_shape, value_shape, mx.float32, mx.float32)
    traced = []

    def step(position: mx.array, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        traced.append(position)
        start = position % SIZE if window else position
        mask = ring_band(position, 1, SIZE, window) if window else band(position, 1, 0, rows, 0)
        # The run has the length; where it begins is the array.
        store.write(Placement((Run(0, 1),), (start,)), keys, values)
        held = store.read((Run(0, rows),)).dense()
        return mx.fast.scaled_dot_product_attention(queries, *held, scale=SCALE, mask=mask)

    state = [store.keys, store.values]

    def with_state(*arguments: mx.array) -> list[mx.array]:
        store.keys, store.values, *rest = arguments
        answer = step(*rest)
        return [answer, store.keys, store.values]

    compiled = mx.compile(with_state)
    for position in range(ROWS):
        given = [
            mx.array(random.normal(size=(1, heads, 1, dim)).astype(np.float32))
            for heads, dim in (
                (2 * facts.kv_heads, facts.key_dim),
                (facts.kv_heads, facts.key_dim),
                (facts.kv_heads, facts.value_dim),
            )
        ]
        answer, *state = compiled(*state, mx.array([position]), *given)
        expected = cache.attend(0, *given, SCALE)
        np.testing.assert_allclose(np.array(answer), np.array(expected), atol=1e-5)
        if position == 2:
            # One position early: the answer is another, so the position does reach the graph.
            early, *_ = compiled(*state, mx.array([position - 1]), *given)
            assert np.abs(np.array(early) - np.array(expected)).max() > 1e-3
    assert len(traced) == 1
    assert cache.length == ROWS > SIZE
