"""Memory is freed when the cache goes, without the cycle collector, and copies are independent."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer
from tests.support.arrays import raw
from tests.support.sequence_oracle import FORMS, observe, simple_geometry

MEGABYTE = 2**20


class WatchedLayer(MLXLMLayer):
    """A layer that can be referred to weakly."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def geometry() -> CacheGeometry:
    return simple_geometry(0, 100, 0, 100, kv_heads=4, key_dim=64, value_dim=64, shared=True)


def used_cache() -> MLXSequenceCache:
    """About 4 MiB of pools, after steps of every kind."""
    cache = MLXSequenceCache(geometry(), CacheConfig(4096, spare=8), WatchedLayer)
    for count in (5, 700, 1, 1, 3, 300, 1):
        rows = mx.ones((1, 4, count, 64))
        for layer in range(4):
            mask = cache.layer(layer).make_mask(count, return_array=True)
            mx.eval(cache.layer(layer).update_and_fetch(rows, rows))
            if isinstance(mask, mx.array):
                mx.eval(mask)
            mx.eval(cache.layers[layer].keys_and_values())
    cache.rewind(cache.length - 1)
    return cache


def active() -> int:
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_cache_frees_its_pools_at_once() -> None:
    before = active()
    cache = used_cache()
    layers = [weakref.ref(layer) for layer in cache.layers]
    whole = weakref.ref(cache)
    assert active() - before >= cache.nbytes > 4 * MEGABYTE
    del cache
    assert whole() is None
    assert [layer() for layer in layers] == [None] * 4
    assert active() - before < MEGABYTE // 16


@pytest.mark.usefixtures("no_collector")
def test_an_answer_that_a_wide_step_kept_goes_with_the_cache() -> None:
    before = active()
    cache = used_cache()
    rows = mx.ones((1, 4, 500, 64))
    for layer in range(4):
        mx.eval(cache.layer(layer).update_and_fetch(rows, rows))
    del cache
    assert active() - before < MEGABYTE


@pytest.mark.usefixtures("no_collector")
def test_layers_without_their_cache_keep_only_what_they_need() -> None:
    before = active()
    layers = list(used_cache().layers)
    last = layers[-1]
    del layers
    assert active() - before < last.nbytes + MEGABYTE // 4
    del last
    assert active() - before < MEGABYTE // 16


@pytest.mark.usefixtures("no_collector")
def test_a_refused_update_leaves_no_pool_behind_in_its_traceback() -> None:
    before = active()
    cache = used_cache()
    try:
        cache.layer(0).update_and_fetch(mx.ones((1, 4, 9, 63)), mx.ones((1, 4, 9, 64)))
    except ValueError as error:
        kept = error
    assert str(kept)
    del kept, cache
    assert active() - before < MEGABYTE // 16


def step(layers: list[MLXLMLayer], count: int, fill: float) -> list[mx.array]:
    rows = mx.full((1, 2, count, 3), float(fill))
    answers = []
    for layer in layers:
        layer.make_mask(count)
        answers += layer.update_and_fetch(rows, rows[..., :2])
    return answers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["layers", "cache"])
def test_a_deep_copy_is_independent(form: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_KVCACHE_START", form)
    config = CacheConfig(100, initial_capacity=2, spare=2)
    for length in range(1, 9):
        cache = MLXSequenceCache(simple_geometry(0, 3, 3), config, MLXLMLayer)
        for position in range(length):
            step(list(cache.layers), 1, position)
        before = observe(cache)
        if what == "cache":
            twin = copy.deepcopy(cache)
            assert observe(twin) == before
            twin_layers = list(twin.layers)
        else:
            twin_layers = copy.deepcopy(list(cache.layers))
        kept = [raw(array) for array in cache.state]
        for count in (1, 1, 4, 1):
            step(twin_layers, count, 99)
        assert [layer.offset for layer in twin_layers] == [length + 7] * 3
        assert observe(cache) == before
        assert [raw(array) for array in cache.state] == kept
        # The original goes its own way, and its copy stays where it is.
        held = [(raw(layer.keys), raw(layer.values), layer.offset) for layer in twin_layers]
        answers = step(list(cache.layers), 1, 55)
        assert (answers[0][:, :, -1] == 55).all()
        assert not (answers[0] == 99).any()
        now = [(raw(layer.keys), raw(layer.values), layer.offset) for layer in twin_layers]
        assert now == held
        for layer in twin_layers:
            layer.trim(1)
        assert cache.length == length + 1
        assert {layer.offset for layer in cache.layers} == {length + 1}
