"""Growth: few reallocations, in the rows that the layout says, and no row lost."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_kvcache import MLXSequenceCache
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.layout import grown_rows
from tests.support.arrays import raw
from tests.support.sequence_oracle import FORMS, Session, Shape, make_cache, simple_geometry


def step(cache, count: int) -> None:
    keys = mx.random.normal((1, 2, count, 3))
    for layer in range(len(cache.layers)):
        cache.layer(layer).update_and_fetch(keys, keys[..., :2])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("initial", [0, 1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_a_flat_layer_doubles_and_keeps_its_rows(form: str, initial: int, chunk: int) -> None:
    capacity = 300
    config = CacheConfig(capacity, initial_capacity=initial)
    cache = make_cache(simple_geometry(0, 0), config, form)
    expected = initial
    growths = 0
    while cache.can_extend(chunk):
        held = [(raw(layer.keys), raw(layer.values)) for layer in cache.layers]
        rows = [layer.rows for layer in cache.layers]
        old = cache.length
        before = [
            (raw(layer.keys[:, :, :old]), raw(layer.values[:, :, :old])) if layer.rows else None
            for layer in cache.layers
        ]
        step(cache, chunk)
        expected = grown_rows(expected, cache.length, capacity)
        assert [layer.rows for layer in cache.layers] == [expected] * 2
        growths += rows[0] not in (0, expected)
        for layer, kept in zip(cache.layers, before, strict=True):
            if kept is not None:
                assert raw(layer.keys[:, :, :old]) == kept[0]
                assert raw(layer.values[:, :, :old]) == kept[1]
        assert [(raw(layer.keys), raw(layer.values)) for layer in cache.layers] != held
    assert growths <= math.ceil(math.log2(capacity / max(initial, 1))) + 1
    assert expected <= capacity


def test_rows_stop_at_the_capacity() -> None:
    cache = make_cache(simple_geometry(0), CacheConfig(11, initial_capacity=4))
    for _ in range(11):
        step(cache, 1)
    assert cache.layers[0].rows == 11
    small = make_cache(simple_geometry(0), CacheConfig(3))
    step(small, 1)
    assert small.layers[0].rows == 3


@pytest.mark.parametrize("form", FORMS)
def test_a_ring_grows_to_its_size_and_no_further(form: str) -> None:
    config = CacheConfig(10_000, initial_capacity=4, spare=8)
    cache = make_cache(simple_geometry(50), config, form)
    seen = []
    for _ in range(200):
        step(cache, 1)
        rows = cache.layers[0].rows
        if not seen or seen[-1] != rows:
            seen.append(rows)
    assert seen == [4, 8, 16, 32, 57]
    step(cache, 500)
    assert cache.layers[0].rows == 57


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_reserve_grows_once(form: str, when: str) -> None:
    cache = make_cache(simple_geometry(0, 6), CacheConfig(1000, initial_capacity=4), form)
    if when == "later":
        step(cache, 3)
    cache.reserve(200)
    rows = []
    for _ in range(190):
        step(cache, 1)
        rows.append([layer.rows for layer in cache.layers])
    assert rows == [[200, 69]] * 190
    cache.reserve(50)
    step(cache, 1)
    assert [layer.rows for layer in cache.layers] == [200, 69]


def test_a_clear_keeps_the_rows_and_a_new_batch_takes_as_many() -> None:
    run = Session([Shape(0), Shape(3)], initial_capacity=2)
    for _ in range(20):
        run.step(1)
    run.flush()
    rows = [layer.rows for layer in run.caches[0].layers]
    for batch in (1, 3):
        run.clear()
        run.batch = batch
        run.step(1)
        run.step(2)
        run.flush()
        assert [layer.rows for layer in run.caches[0].layers] == rows


def test_one_wide_step_first() -> None:
    """The first step is larger than everything: initial rows, window and ring."""
    run = Session([Shape(0), Shape(3), Shape(1)], initial_capacity=0, spare=2)
    run.step(77)
    run.step(1)
    run.flush()
    assert [layer.rows for layer in run.caches[0].layers] == [128, 4, 2]


def test_a_ring_with_many_spare_rows_is_not_allocated_before_it_is_needed() -> None:
    cache = MLXSequenceCache(
        simple_geometry(16), CacheConfig(10**6, initial_capacity=8, spare=65_536)
    )
    rows = mx.ones((1, 2, 1, 3))
    for position in range(200):
        cache.layer(0).make_mask(1)
        cache.layer(0).update_and_fetch(rows * position, rows[..., :2])
        assert cache.layers[0].rows <= max(8, 2 * (position + 1))
    held, _ = cache.layers[0].keys_and_values()
    assert held[0, 0, :, 0].tolist() == list(range(184, 200))
