"""The byte arithmetic against the real arrays of our cache and of mlx-lm's."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from mlx_kvcache import CacheConfig, CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import CapacityError, ConfigError
from mlx_kvcache.facts.config import item_size
from mlx_kvcache.layout.footprint import (
    Extent,
    footprint,
    mlx_lm_chunked_rows,
    mlx_lm_rows,
    rotating_prefill_rows,
    sequence_footprint,
)

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6
ROW_NUMBERS = HEADS * (KEY_DIM + VALUE_DIM)


def geometry(*windows):
    return CacheGeometry(
        tuple(
            LayerGeometry(LayerPolicy.from_window(window), HEADS, KEY_DIM, VALUE_DIM)
            for window in windows
        )
    )


def rows_of(count, dtype=mx.float16):
    return mx.zeros((1, HEADS, count, KEY_DIM), dtype), mx.zeros(
        (1, HEADS, count, VALUE_DIM), dtype
    )


def filled(shape, config, steps):
    cache = MLXSequenceCache(shape, config)
    for count in steps:
        for layer in range(len(shape.layers)):
            cache.layer(layer).update_and_fetch(*rows_of(count))
    mx.eval(cache.state)
    return cache


def steps_up_to(tokens, size):
    return [size] * (tokens // size) + ([tokens % size] if tokens % size else [])


BOUNDARIES = [1, 2, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1500, 1999, 2000]


@pytest.mark.parametrize("tokens", BOUNDARIES)
@pytest.mark.parametrize("size", [1, 100, 3000])
def test_our_figures_are_the_arrays(tokens, size):
    if size == 1 and tokens > 600:
        size = 7
    shape = geometry(0, 512, 40, 700)
    config = CacheConfig(capacity=2000, kv_dtype="float16")
    cache = filled(shape, config, steps_up_to(tokens, size))
    told = sequence_footprint(shape, tokens, config, item_size("float16"))
    assert told.total == Extent(cache.nbytes_used, cache.nbytes)
    assert [layer.allocated for layer in told.layers] == [layer.nbytes for layer in cache.layers]
    assert told.tokens == cache.length


@pytest.mark.slow
@pytest.mark.parametrize("initial", [0, 1, 3, 16, 100])
@pytest.mark.parametrize("spare", [1, 2, 5, 200])
@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 9, 12, 13, 24, 25, 99, 100])
def test_our_figures_for_other_choices(initial, spare, tokens):
    shape = geometry(0, 1, 8, 9, 1000)
    config = CacheConfig(100, "float32", initial, spare)
    told = sequence_footprint(shape, tokens, config, 4)
    for size in (1, 6, 100):
        cache = filled(shape, config, steps_up_to(tokens, size))
        assert told.total == Extent(cache.nbytes_used, cache.nbytes)


def test_our_figures_depend_on_what_was_chosen():
    shape = geometry(0, 8)
    totals = {
        sequence_footprint(shape, tokens, CacheConfig(100, None, initial, spare), size).total
        for tokens, initial, spare, size in [
            (20, 16, 4, 2),
            (33, 16, 4, 2),
            (20, 5, 4, 2),
            (20, 16, 5, 2),
            (20, 16, 4, 4),
        ]
    }
    assert len(totals) == 5


def test_nothing_is_held_before_the_first_token():
    shape = geometry(0, 8)
    assert sequence_footprint(shape, 0, CacheConfig(), 2).total == Extent(0, 0)
    assert footprint(shape, 0, 2, mlx_lm_rows).total == Extent(0, 0)
    assert MLXSequenceCache(shape).nbytes == 0


def test_refusals():
    shape = geometry(0, 8)
    with pytest.raises(CapacityError, match="101 tokens do not fit into a capacity of 100"):
        sequence_footprint(shape, 101, CacheConfig(100), 2)
    with pytest.raises(ConfigError, match="cannot hold -1 tokens"):
        sequence_footprint(shape, -1, CacheConfig(100), 2)
    with pytest.raises(ConfigError, match="initial_capacity"):
        sequence_footprint(shape, 1, CacheConfig(100, None, -1), 2)
    with pytest.raises(ConfigError, match="int8"):
        item_size("int8")


@pytest.mark.parametrize("window", [0, 1, 8, 255, 256, 257, 300, 512])
def test_mlx_lm_figures_token_by_token(window):
    cache = RotatingKVCache(window) if window else KVCache()
    policy = LayerPolicy.from_window(window)
    for tokens in range(1, 1100):
        cache.update_and_fetch(*rows_of(1))
        assert mlx_lm_rows(policy, tokens).allocated * ROW_NUMBERS * 2 == cache.nbytes, tokens
        assert mlx_lm_rows(policy, tokens).used == cache.size()
        if tokens % 64 == 0:
            mx.eval(cache.keys, cache.values)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 2047, 2048, 2049, 2305, 4096, 5000])
def test_mlx_lm_figures_of_a_prefill(tokens):
    """mlx-lm prefills all but the last token in chunks, and then that one."""
    cache = KVCache()
    for count in [*steps_up_to(tokens - 1, 2048), 1]:
        cache.update_and_fetch(*rows_of(count))
    assert mlx_lm_rows(LayerPolicy.flat(), tokens).allocated * ROW_NUMBERS * 2 == cache.nbytes


@pytest.mark.parametrize("window", [1, 8, 9, 16, 50])
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 20])
@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 17, 40, 60])
def test_rows_of_a_rotating_cache_during_prefill(window, chunk, tokens):
    if chunk == 1:
        # One token is a decode step, which is written in place.
        chunk = 3
    cache = RotatingKVCache(window)
    most = 0
    for count in steps_up_to(tokens, chunk):
        if count == 1:
            # The last token of a prompt is decoded; the peak was before it.
            break
        cache.update_and_fetch(*rows_of(count))
        most = max(most, cache.keys.shape[2])
        tokens_done = cache.offset
    assert rotating_prefill_rows(window, tokens_done, chunk) == most


@pytest.mark.parametrize("chunk", [1, 8, 255, 256, 300])
def test_chunked_figures_token_by_token(chunk):
    cache = ChunkedKVCache(chunk)
    policy = LayerPolicy.ring(chunk)
    for tokens in range(1, 700):
        cache.maybe_trim_front()
        cache.update_and_fetch(*rows_of(1))
        told = mlx_lm_chunked_rows(policy, tokens)
        assert told.allocated * ROW_NUMBERS * 2 == cache.nbytes, tokens
        assert told.used == cache.offset - cache.start_position
        if tokens % 64 == 0:
            mx.eval(cache.keys, cache.values)
    flat = LayerPolicy.flat()
    assert mlx_lm_chunked_rows(flat, 700) == mlx_lm_rows(flat, 700)
