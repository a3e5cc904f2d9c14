"""Forks copy at the first write, removal frees, nothing is kept alive by the last step."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import pytest

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy

pytestmark = pytest.mark.usefixtures("collected")

HEADS, DIM, LAYERS, ROWS = 2, 64, 4, 2048
MEGABYTE = 2**20
#: Bytes of a session of ROWS positions: two flat layers, and two rings that are small.
FLAT = (LAYERS // 2) * HEADS * DIM * ROWS * 2 * 4


def make() -> MLXBatchedSequenceCache:
    layer = LayerGeometry(LayerPolicy.flat(), HEADS, DIM, DIM)
    windowed = LayerGeometry(LayerPolicy.ring(32), HEADS, DIM, DIM)
    return MLXBatchedSequenceCache(
        CacheGeometry((layer, windowed) * (LAYERS // 2)), CacheConfig(10**6)
    )


def run(cache: MLXBatchedSequenceCache, spans: list[tuple[int, int]]) -> None:
    tokens = cache.declare_step(spans).tokens
    rows = mx.ones((1, HEADS, tokens, DIM))
    for layer in range(LAYERS):
        mx.eval(cache.attend(layer, rows, rows, rows, 1.0), cache.state)
    mx.synchronize()


def session(cache: MLXBatchedSequenceCache) -> int:
    sequence = cache.new()
    rows = mx.ones((1, HEADS, ROWS // 2 - 1, DIM))
    for _ in range(2):
        cache.declare_step([(sequence, ROWS // 2 - 1)])
        for layer in range(LAYERS):
            cache.update_and_fetch(layer, rows, rows)
        mx.eval(cache.state)
    return sequence


def active() -> int:
    mx.synchronize()
    return mx.get_active_memory()


def test_a_fork_is_copied_by_its_first_write_and_only_once() -> None:
    cache = make()
    origin = session(cache)
    run(cache, [(origin, 1)])
    before = active()
    twin = cache.fork(origin, ROWS - 2)
    assert active() - before < MEGABYTE // 16
    assert [id(a) for a in cache.sequence(twin).state] == [
        id(a) for a in cache.sequence(origin).state
    ]
    run(cache, [(twin, 1)])
    copied = active() - before
    assert 0.9 * FLAT < copied < 1.3 * FLAT
    run(cache, [(origin, 1)])
    assert active() - before < copied + MEGABYTE // 4
    cache.remove(twin)
    assert active() - before < MEGABYTE // 4


def test_decode_steps_write_in_place() -> None:
    cache = make()
    sequences = [session(cache) for _ in range(2)]
    run(cache, [(sequence, 1) for sequence in sequences])
    before = active()
    mx.reset_peak_memory()
    cache.declare_step([(sequence, 1) for sequence in sequences])
    rows = mx.ones((1, HEADS, 2, DIM))
    for layer in range(LAYERS):
        mx.eval(cache.attend(layer, rows, rows, rows, 1.0), cache.state)
    assert mx.get_peak_memory() - before < FLAT // LAYERS // 4
    held = cache.state
    before = active()
    run(cache, [(sequences[0], 1)])
    assert active() - before > FLAT // 2, "the measure sees a copy"
    del held


def test_removal_frees_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        before = active()
        cache = make()
        sequences = [session(cache) for _ in range(3)]
        run(cache, [(sequence, 1) for sequence in sequences])
        watched = [weakref.ref(cache.sequence(sequence)) for sequence in sequences]
        for sequence in sequences:
            cache.remove(sequence)
        assert [one() for one in watched] == [None] * 3
        assert cache.nbytes == 0
        assert active() - before < MEGABYTE // 16
    finally:
        gc.enable()
