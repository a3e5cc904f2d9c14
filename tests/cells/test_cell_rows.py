"""MLXCellCache: which rows and masks layers are answered with, dtypes, growth, sinks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import AttentionError, CapacityError, ConfigError, StepError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from tests.support.arrays import numbers, raw
from tests.support.many_sequences_driver import (
    HEADS,
    KEY_DIM,
    SCALE,
    VALUE_DIM,
    Driver,
    geometry_of,
)

Spans = list[tuple[int, int]]


def make(*windows: int, **config: Any) -> MLXCellCache:
    return MLXCellCache(geometry_of(windows), CacheConfig(**{"capacity": 100, **config}))


def rows(count: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, HEADS, count, KEY_DIM)).astype(dtype)
    return keys, mx.random.normal((1, HEADS, count, VALUE_DIM)).astype(dtype)


def step(cache: MLXCellCache, spans: Spans, dtype: mx.Dtype = mx.float32) -> list[Any]:
    """A step through update_and_fetch: the mask and the rows of each layer."""
    tokens = cache.declare_step(spans).tokens
    answers = []
    for layer in range(len(cache.geometry.layers)):
        mask = cache.make_mask(layer)
        answers.append((mask, *cache.update_and_fetch(layer, *rows(tokens, dtype))))
    return answers


def test_one_sequence_alone_needs_no_mask_of_its_own() -> None:
    cache = make(0, 4)
    a = cache.new()
    for count, flat, ring in ((3, "causal", "causal"), (1, None, None), (1, None, None)):
        (mask, keys, values), (ring_mask, ring_keys, _) = step(cache, [(a, count)])
        assert (mask, ring_mask) == (flat, ring)
        assert keys.shape[2] == values.shape[2] == cache.position(a)
        assert ring_keys.shape[2] == min(cache.position(a), 4)
    (mask, _, _), (ring_mask, ring_keys, _) = step(cache, [(a, 3)])
    assert mask == "causal"
    assert ring_keys.shape[2] == 4 + 3 - 1
    assert ring_mask.shape == (3, 6)
    assert np.array(ring_mask).sum(1).tolist() == [4, 4, 4]


def test_gaps_between_the_cells_of_a_sequence_are_masked() -> None:
    """A window of 2 over positions that lie far apart: neighbors in the store are no neighbors."""
    cache = make(2)
    a, b = cache.new(), cache.new()
    step(cache, [(a, 1), (b, 3)])
    ((mask, keys, _),) = step(cache, [(a, 1)])
    assert keys.shape[2] == 5
    assert np.array(mask).tolist() == [[True, False, False, False, True]]
    # Rows a of positions 0 and 1 surround three cells; the window of position 2 drops the first.
    ((mask, keys, _),) = step(cache, [(a, 1)])
    assert mask is None
    assert keys.shape[2] == 2


def test_only_the_cells_that_somebody_sees_are_read() -> None:
    cache = make(0, 3)
    a, b = cache.new(), cache.new()
    step(cache, [(a, 20)])
    step(cache, [(b, 5)])
    (_, keys, _), (_, ring_keys, _) = step(cache, [(b, 1)])
    assert keys.shape[2] == 6
    assert ring_keys.shape[2] == 3
    (mask, keys, _), (ring_mask, ring_keys, _) = step(cache, [(b, 1), (a, 1)])
    assert keys.shape[2] == 28
    assert mask.shape == (2, 28)
    # The newest rows of `a` begin at 18, those of `b` end at 27.
    assert ring_keys.shape[2] == 28 - 18
    assert np.array(ring_mask).sum(1).tolist() == [3, 3]


def test_a_mask_is_made_once_for_each_window() -> None:
    cache = make(0, 3, 0, 3, 5)
    a, b = cache.new(), cache.new()
    step(cache, [(a, 4), (b, 6)])
    masks = [mask for mask, _, _ in step(cache, [(a, 2), (b, 1)])]
    assert masks[0] is masks[2]
    assert masks[1] is masks[3]
    assert len({id(mask) for mask in masks}) == 3
    later = [mask for mask, _, _ in step(cache, [(a, 2), (b, 1)])]
    assert later[0] is not masks[0]


def test_the_mask_fits_whether_it_is_asked_for_before_or_after() -> None:
    cache = make(0)
    a, b = cache.new(), cache.new()
    cache.declare_step([(a, 2), (b, 3)])
    before = cache.make_mask(0)
    keys, _ = cache.update_and_fetch(0, *rows(5))
    assert isinstance(before, mx.array)
    assert cache.make_mask(0) is before
    assert before.shape == (5, keys.shape[2])


@pytest.mark.parametrize("kv_dtype", [None, "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scattered", [False, True])
def test_rows_pass_through_the_storage_dtype(kv_dtype: str | None, scattered: bool) -> None:
    cache = make(0, kv_dtype=kv_dtype)
    stored = mx.bfloat16 if kv_dtype is None else getattr(mx, kv_dtype)
    a, b = cache.new(), cache.new()
    step(cache, [(a, 2), (b, 2)], mx.bfloat16)
    if scattered:
        cache.rewind(a, 0)
        step(cache, [(b, 1)], mx.bfloat16)
        cache.remove(a)
    spans = [(b, 3)]
    cache.declare_step(spans)
    keys, values = rows(3)
    held_keys, held_values = cache.update_and_fetch(0, keys, values)
    assert held_keys.dtype == held_values.dtype == mx.float32
    pool = cache.pool(0)
    assert pool.keys is not None
    assert pool.values is not None
    assert pool.keys.dtype == pool.values.dtype == stored
    cells = mx.array(list(cache.layout.placed_cells))
    assert (pool.keys[:, :, cells] == keys.astype(stored)).all()
    assert (pool.values[:, :, cells] == values.astype(stored)).all()


def test_the_answer_has_the_dtype_of_the_queries() -> None:
    cache = make(0, kv_dtype="float16")
    a, b = cache.new(), cache.new()
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        cache.declare_step([(a, 2), (b, 1)])
        queries = mx.random.normal((1, HEADS * 2, 3, KEY_DIM)).astype(dtype)
        assert cache.attend(0, queries, *rows(3), SCALE).dtype == dtype


def test_sinks_take_their_share() -> None:
    def attended(sinks: mx.array | None) -> np.ndarray:
        mx.random.seed(3)
        cache = make(0)
        a, b = cache.new(), cache.new()
        cache.declare_step([(a, 2), (b, 1)])
        queries = mx.random.normal((1, HEADS, 3, KEY_DIM))
        return numbers(cache.attend(0, queries, *rows(3), SCALE, sinks))

    plain = attended(None)
    assert np.abs(attended(mx.full((HEADS,), -1e9)) - plain).max() < 1e-6
    ample = attended(mx.array([0.0, 1e9]))
    assert np.abs(ample[:, 1]).max() == 0
    assert (np.abs(ample[:, 0]) < np.abs(plain[:, 0])).all()
    with pytest.raises(AttentionError, match="sinks"):
        attended(mx.zeros((HEADS + 1,)))


def test_pools_double_up_to_the_capacity() -> None:
    cache = make(0, 3, capacity=20, initial_capacity=2)
    a = cache.new()
    assert cache.nbytes == 0
    sizes = []
    for count in (1, 1, 3, 4, 8):
        step(cache, [(a, count)])
        sizes.append([cache.pool(layer).rows for layer in (0, 1)])
    assert sizes == [[2, 2], [2, 2], [8, 8], [16, 16], [20, 20]]
    with pytest.raises(CapacityError, match="3 are free"):
        cache.declare_step([(a, 4)])
    step(cache, [(a, 3)])
    assert cache.free == 0


@pytest.mark.parametrize("initial", [0, 1, 4000])
def test_initial_capacity_is_clamped(initial: int) -> None:
    cache = make(0, capacity=4, initial_capacity=initial)
    a = cache.new()
    step(cache, [(a, 1)])
    assert cache.pool(0).rows == {0: 1, 1: 1, 4000: 4}[initial]


def test_growth_keeps_the_cells() -> None:
    driver = Driver(MLXCellCache, (0, 3), initial_capacity=1, capacity=70, shared=())
    a, b = driver.new(), driver.new()
    for _ in range(6):
        driver.step([(a, 3), (b, 2)])
        driver.check()


def test_reserve_grows_once() -> None:
    cache = make(0, initial_capacity=2)
    a = cache.new()
    step(cache, [(a, 2)])
    before = raw(cache.pool(0).keys)
    cache.reserve(50)
    assert cache.pool(0).rows == 50
    assert before is not None
    assert raw(cache.pool(0).keys[:, :, :2]) == before  # type: ignore[index]
    step(cache, [(a, 40)])
    assert cache.pool(0).rows == 50
    with pytest.raises(CapacityError):
        cache.reserve(101)


def test_keys_without_values() -> None:
    """An indexer layer keeps keys only; there is nothing to attend to, but rows to fetch."""
    geometry = CacheGeometry((LayerGeometry(LayerPolicy.flat(), 1, 4, 0),))
    cache = MLXCellCache(geometry, CacheConfig(20))
    a, b = cache.new(), cache.new()
    cache.declare_step([(a, 2), (b, 2)])
    keys, values = cache.update_and_fetch(0, mx.ones((1, 1, 4, 4)), mx.zeros((1, 1, 4, 0)))
    assert keys.shape == (1, 1, 4, 4)
    assert values.shape == (1, 1, 4, 0)
    cache.declare_step([(a, 1)])
    with pytest.raises(AttentionError, match="no values"):
        cache.attend(0, mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)), mx.zeros((1, 1, 1, 0)), 1.0)


def test_a_forgotten_declaration_is_noticed() -> None:
    cache = make(0, 0)
    a = cache.new()
    step(cache, [(a, 2)])
    held = raw(cache.pool(0).keys)
    with pytest.raises(StepError, match="already written"):
        cache.update_and_fetch(0, *rows(2))
    with pytest.raises(StepError, match="already written"):
        cache.attend(1, rows(2)[0], *rows(2), SCALE)
    assert raw(cache.pool(0).keys) == held
    # Whoever gives the positions of the step that ran may ask for it again, as often as they like.
    again = cache.update_and_fetch(0, *rows(2), positions=[0, 1])
    assert (again[0] == cache.pool(0).keys[:, :, :2]).all()  # type: ignore[index]
    assert raw(cache.pool(0).keys) == held


def test_every_constructor_validates() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        make(0, capacity=0)
    with pytest.raises(ConfigError, match="max_context"):
        MLXCellCache(geometry_of((0,)), CacheConfig(10, max_context=0))
