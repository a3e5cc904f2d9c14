"""What holds for both caches of many sequences: faces, kinds, options, copies, isolation."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache import FACTORY, CacheConfig, SharedControl, StepBackend, attend
from mlx_kvcache.cache.attention import AttendSpec
from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import AttentionError, UpdateDtypeError
from tests.support.arrays import numbers
from tests.support.many_sequences_driver import (
    HEADS,
    KEY_DIM,
    SCALE,
    VALUE_DIM,
    Driver,
    geometry_of,
    observe,
)

CACHES = [MLXCellCache, MLXBatchedSequenceCache]
both = pytest.mark.parametrize("cache_class", CACHES)


@pytest.mark.parametrize(("kind", "cache_class"), [("cell", CACHES[0]), ("batched", CACHES[1])])
def test_the_factory_makes_them(kind: str, cache_class: Any) -> None:
    config = CacheConfig(50)
    cache = FACTORY.build("mlx", kind, geometry_of((0, 3)), config)
    assert type(cache) is cache_class
    assert cache.config is config
    assert (cache.capacity, cache.nbytes) == (50, 0)
    assert isinstance(cache, SharedControl)
    assert isinstance(cache, StepBackend)
    assert not isinstance(FACTORY.build("mlx", "sequence", geometry_of((0,))), SharedControl)


@both
def test_softcap_and_output_dtype(cache_class: Any) -> None:
    cache = cache_class(geometry_of((0,)), CacheConfig(50))
    a, b = cache.new(), cache.new()
    cache.declare_step([(a, 3), (b, 1)])
    queries = 9 * mx.random.normal((1, 2 * HEADS, 4, KEY_DIM))
    keys = mx.random.normal((1, HEADS, 4, KEY_DIM))
    values = mx.random.normal((1, HEADS, 4, VALUE_DIM))
    options: dict[str, Any] = {"softcap": 2.0, "out_dtype": mx.float16}
    answer = cache.attend(0, queries, keys, values, SCALE, **options)
    assert answer.dtype == mx.float16
    causal = AttendSpec("causal")
    own = (queries[:, :, :3], keys[:, :, :3], values[:, :, :3], causal, SCALE)
    assert np.allclose(numbers(answer[:, :, :3]), numbers(attend(*own, softcap=2.0)), atol=2e-3)
    assert not np.allclose(numbers(answer[:, :, :3]), numbers(attend(*own)), atol=2e-2)
    again = cache.attend(0, queries, keys, values, SCALE, positions=[0, 1, 2, 0], **options)
    assert (again == answer).all()


@both
def test_options_that_do_not_fit_are_refused(cache_class: Any) -> None:
    driver = Driver(cache_class, (0,), shared=())
    a = driver.new()
    step = driver.declare([(a, 2)])
    rows = mx.ones((1, HEADS, 2, KEY_DIM))
    values = mx.ones((1, HEADS, 2, VALUE_DIM))
    for error, scale, options in (
        (AttentionError, float("nan"), {}),
        (AttentionError, SCALE, {"softcap": -1.0}),
        (AttentionError, SCALE, {"sinks": mx.zeros((HEADS, 1))}),
        (UpdateDtypeError, SCALE, {"out_dtype": mx.int32}),
        (UpdateDtypeError, SCALE, {"sinks": mx.zeros((HEADS,), mx.int32)}),
    ):
        driver.refused(
            error,
            lambda s=scale, o=options: driver.cache.attend(0, rows, rows, values, s, **o),
        )
    driver.run(step, driver.layers)
    driver.check()


@both
def test_a_deep_copy_is_independent(cache_class: Any) -> None:
    driver = Driver(cache_class, (0, 3), shared=())
    a, b = driver.new(), driver.new()
    driver.step([(a, 3), (b, 2)])
    driver.fork(a)
    twin = copy.deepcopy(driver.cache)
    before = observe(driver.cache)
    assert observe(twin) == before
    driver.step([(a, 1), (2, 4), (b, 1)])
    driver.check()
    assert observe(twin) == before
    twin.remove(a)
    driver.check()


def poisoned(cache_class: Any) -> tuple[Any, int, int]:
    """A cache in which one sequence has written rows that are no numbers, and its neighbor."""
    cache = cache_class(geometry_of((0,)), CacheConfig(50, initial_capacity=16))
    sick, well = cache.new(), cache.new()
    rows = mx.ones((1, HEADS, 4, KEY_DIM))
    values = mx.ones((1, HEADS, 4, VALUE_DIM))
    bad = mx.array([True, True, False, False])[:, None]
    cache.declare_step([(sick, 2), (well, 2)])
    answer = cache.attend(0, rows, rows, mx.where(bad, float("nan"), values), SCALE)
    assert mx.isnan(answer[:, :, :2]).all()
    return cache, sick, well


def decoded(cache: Any, sequence: int) -> mx.array:
    rows = mx.ones((1, HEADS, 1, KEY_DIM))
    cache.declare_step([(sequence, 1)])
    return cache.attend(0, rows, rows, mx.ones((1, HEADS, 1, VALUE_DIM)), SCALE)


def test_values_that_are_no_numbers_stay_in_their_own_pools() -> None:
    cache, sick, well = poisoned(MLXBatchedSequenceCache)
    assert (decoded(cache, well) == 1).all()
    assert mx.isnan(decoded(cache, sick)).all()


def test_defragmentation_clears_cells_of_values_that_are_no_numbers() -> None:
    """A masked cell has weight 0, and 0 times NaN is NaN: such a cell must not be read at all."""
    cache, sick, well = poisoned(MLXCellCache)
    other = cache.fork(well, 1)
    cache.remove(sick)
    cache.defragment()
    assert (decoded(cache, well) == 1).all()
    assert (decoded(cache, other) == 1).all()
    for array in cache.state:
        assert not mx.isnan(array).any()


def test_every_kind_attends_in_the_dtype_of_the_queries() -> None:
    """New rows of a narrower dtype do not round the rows that are stored."""
    geometry = geometry_of((0,))
    facts = geometry.layers[0]
    random = np.random.default_rng(5)
    answers = []
    keys, values = (
        mx.array(random.normal(size=(1, facts.kv_heads, 6, dim)).astype(np.float32))
        for dim in (facts.key_dim, facts.value_dim)
    )
    for kind in ("sequence", "cell", "batched"):
        cache: Any = FACTORY.build("mlx", kind, geometry, CacheConfig(64, kv_dtype="float32"))
        sequence = None if kind == "sequence" else cache.new()
        for part, dtype in ((slice(0, 5), mx.float32), (slice(5, 6), mx.bfloat16)):
            new_keys = keys[:, :, part]
            if sequence is not None:
                cache.declare_step([(sequence, new_keys.shape[2])])
            rows = new_keys.astype(dtype), values[:, :, part].astype(dtype)
            answer = cache.attend(0, new_keys * 0.2, *rows, SCALE)
        answers.append(np.array(answer).tolist())
    assert answers[0] == answers[1] == answers[2]
