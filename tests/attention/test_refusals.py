"""Each call that the op refuses: a typed error, and the cache as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache import CacheSession, MLXSequenceCache, make_prompt_cache
from mlx_kvcache.control.op import update_and_attend
from mlx_kvcache.errors import (
    AttentionError,
    CapacityError,
    FaceError,
    GeometryError,
    LayerIndexError,
    NoActiveCacheError,
    PositionError,
    UpdateDtypeError,
    UpdateShapeError,
)
from tests.support.op_driver import Layer, make_cache, observe, step_rows
from tests.support.tiny_models import all_families, build

LAYERS = (
    Layer(window=0, kv_heads=2, group=2, key_dim=4, value_dim=3),
    Layer(window=4, kv_heads=2, group=2, key_dim=4, value_dim=3),
)
HELD = 7
CAPACITY = 20


@pytest.fixture
def cache() -> MLXSequenceCache:
    """Both layers hold 7 positions, and the ring of 6 slots has wrapped."""
    cache = make_cache(LAYERS, capacity=CAPACITY)
    random = np.random.default_rng(0)
    for index, layer in enumerate(LAYERS):
        rows = step_rows(layer, random, 1, HELD)
        mx.eval(update_and_attend(*rows, 0, index, 1.0, cache=cache))
    return cache


def ask(held: MLXSequenceCache | None, /, **changes: Any) -> mx.array:
    """A step of two tokens that would be right, but for the changes."""
    queries, keys, values = step_rows(LAYERS[0], np.random.default_rng(1), 1, 2)
    call: dict[str, Any] = {
        "queries": queries,
        "keys": keys,
        "values": values,
        "positions": HELD,
        "layer": 0,
        "scale": 0.5,
        "cache": held,
    }
    return update_and_attend(**{**call, **changes})


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


SHAPES = {
    "queries without heads": {"queries": zeros(1, 2, 4)},
    "query heads": {"queries": zeros(1, 3, 2, 4)},
    "no query heads": {"queries": zeros(1, 0, 2, 4)},
    "query dim": {"queries": zeros(1, 4, 2, 5)},
    "query tokens": {"queries": zeros(1, 4, 3, 4)},
    "query batch": {"queries": zeros(2, 4, 2, 4)},
    "key heads": {"keys": zeros(1, 1, 2, 4), "values": zeros(1, 1, 2, 3)},
    "key and query dim": {"queries": zeros(1, 4, 2, 5), "keys": zeros(1, 2, 2, 5)},
    "value dim": {"values": zeros(1, 2, 2, 4)},
    "value tokens": {"values": zeros(1, 2, 1, 3)},
    "no tokens": {
        "queries": zeros(1, 4, 0, 4),
        "keys": zeros(1, 2, 0, 4),
        "values": zeros(1, 2, 0, 3),
    },
    "another batch than is held": {
        "queries": zeros(2, 4, 2, 4),
        "keys": zeros(2, 2, 2, 4),
        "values": zeros(2, 2, 2, 3),
    },
}
DTYPES = {
    "integer queries": {"queries": zeros(1, 4, 2, 4, dtype=mx.int32)},
    "integer keys": {"keys": zeros(1, 2, 2, 4, dtype=mx.int32)},
    "bool values": {"values": zeros(1, 2, 2, 3, dtype=mx.bool_)},
    "numpy queries": {"queries": np.zeros((1, 4, 2, 4), np.float32)},
    "integer output": {"out_dtype": mx.int32},
    "named output": {"out_dtype": "float16"},
    "integer sinks": {"sinks": mx.zeros((4,), mx.int32)},
    "listed sinks": {"sinks": [0.0] * 4},
}
OPTIONS = {
    "infinite scale": {"scale": float("inf")},
    "scale that is no number": {"scale": float("nan")},
    "scale on the device": {"scale": mx.array(0.5)},
    "no scale": {"scale": None},
    "sinks of the KV heads": {"sinks": mx.zeros((2,))},
    "sinks with two axes": {"sinks": mx.zeros((1, 4))},
    "softcap of 0": {"softcap": 0.0},
    "negative softcap": {"softcap": -1.0},
    "infinite softcap": {"softcap": float("inf")},
    "softcap that is no number": {"softcap": float("nan")},
    "softcap that is true": {"softcap": True},
}
POSITIONS = {
    "a gap": ([HELD, HELD + 2], "one run"),
    "backwards": ([HELD + 1, HELD], "one run"),
    "siblings": (mx.array([HELD, HELD]), "one run"),
    "several dims": (mx.zeros((2, 3), mx.int32), "3 dims"),
    "too few": ([HELD], "2 tokens need"),
    "too many": ([HELD, HELD + 1, HELD + 2], "2 tokens need"),
    "a row": (mx.array([[HELD, HELD + 1]]), "2 tokens need"),
    "floats": (mx.array([7.0, 8.0]), "must be integers"),
    "bfloat16": (mx.array([7.0, 8.0]).astype(mx.bfloat16), "integer"),
    "a float": (7.0, "must be integers"),
    "true": (True, "must be integers"),
    "nothing": (None, "must be"),
    "a word": ("seven", "must be integers"),
    "ragged": ([[7], [8, 9]], "integer array or list"),
    "negative": (-1, "count from 0"),
    "negative run": ([-1, 0], "count from 0"),
    "ahead": (HELD + 1, "do not continue"),
    "behind": (HELD - 1, "do not continue"),
    "the start": (0, "do not continue"),
    "the last step's end with another count": (HELD - 2, "do not continue"),
}


def check_refused(
    cache: MLXSequenceCache, error: type[Exception], match: str, /, **changes: Any
) -> None:
    """Refused; nothing changed; and the right step still gives the right answer."""
    before = observe(cache)
    with pytest.raises(error, match=match):
        ask(cache, **changes)
    assert observe(cache) == before
    twin = make_cache(LAYERS, capacity=CAPACITY)
    random = np.random.default_rng(0)
    for index, layer in enumerate(LAYERS):
        update_and_attend(*step_rows(layer, random, 1, HELD), 0, index, 1.0, cache=twin)
    for index in (0, 1):
        assert ask(cache, layer=index).tolist() == ask(twin, layer=index).tolist()
    assert observe(cache) == observe(twin)
    assert observe(cache) != before


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layer", [0, 1])
def test_shapes(cache: MLXSequenceCache, name: str, layer: int) -> None:
    check_refused(cache, UpdateShapeError, r"\[|axes", **SHAPES[name], layer=layer)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(cache: MLXSequenceCache, name: str) -> None:
    check_refused(cache, UpdateDtypeError, "float|array", **DTYPES[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_options(cache: MLXSequenceCache, name: str) -> None:
    check_refused(cache, AttentionError, "scale|sinks|softcap", **OPTIONS[name])


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("layer", [0, 1])
def test_positions(cache: MLXSequenceCache, name: str, layer: int) -> None:
    positions, message = POSITIONS[name]
    check_refused(cache, PositionError, message, positions=positions, layer=layer)


@pytest.mark.parametrize("layer", [2, -1, True, "0"])
def test_layers_that_do_not_exist(cache: MLXSequenceCache, layer: Any) -> None:
    check_refused(cache, LayerIndexError, "layer", layer=layer)


def test_steps_beyond_the_capacity(cache: MLXSequenceCache) -> None:
    for tokens in (1, 14):
        queries, keys, values = step_rows(LAYERS[0], np.random.default_rng(1), 1, tokens)
        changes = {"queries": queries, "keys": keys, "values": values}
        if tokens > CAPACITY - HELD:
            check_refused(cache, CapacityError, "capacity is 20", **changes)
        else:
            ask(make_cache(LAYERS, capacity=1), **changes, positions=0)


def test_layers_of_one_step_that_do_not_agree(cache: MLXSequenceCache) -> None:
    ask(cache)
    before = observe(cache)
    rows = step_rows(LAYERS[1], np.random.default_rng(1), 1, 1)
    with pytest.raises(PositionError, match="does not continue the sequence"):
        update_and_attend(*rows, HELD, 1, 1.0, cache=cache)
    assert observe(cache) == before
    ask(cache, layer=1)


def test_a_second_reading_must_fit_what_was_written(cache: MLXSequenceCache) -> None:
    ask(cache)
    before = observe(cache)
    for changes in (SHAPES["another batch than is held"], SHAPES["value dim"]):
        with pytest.raises(UpdateShapeError):
            ask(cache, **changes)
    for positions in (HELD + 1, [HELD, HELD + 2]):
        with pytest.raises(PositionError):
            ask(cache, positions=positions)
    assert observe(cache) == before
    assert ask(cache).shape == (1, 4, 2, 3)


def test_a_rewound_step_is_no_longer_the_last_one(cache: MLXSequenceCache) -> None:
    ask(cache)
    cache.rewind(HELD)
    before = observe(cache)
    with pytest.raises(PositionError, match="do not continue"):
        ask(cache, positions=HELD - 2)
    assert observe(cache) == before


def test_a_large_step_is_only_read_again_by_layers_that_are_marked_shared() -> None:
    layer = Layer(window=4)
    cache = make_cache([layer], spare=2)
    rows = step_rows(layer, np.random.default_rng(1), 1, 9)
    update_and_attend(*rows, 0, 0, 1.0, cache=cache)
    before = observe(cache)
    with pytest.raises(GeometryError, match=r"set LayerGeometry.shared"):
        update_and_attend(*rows, 0, 0, 1.0, cache=cache)
    assert observe(cache) == before


def test_the_list_for_mlx_lm_is_no_cache(cache: MLXSequenceCache) -> None:
    listed = make_prompt_cache(build("llama", all_families()["llama"]))
    check_refused(cache, FaceError, r"pass its \.sequence", cache=listed)


def test_a_number_is_no_cache(cache: MLXSequenceCache) -> None:
    check_refused(cache, FaceError, "got int", cache=3)


@pytest.fixture
def session() -> Iterator[CacheSession]:
    geometry = make_cache(LAYERS).geometry
    with CacheSession(geometry) as session:
        yield session


def test_without_a_cache_the_active_one_is_meant(session: CacheSession) -> None:
    answer = ask(None, positions=0)
    assert session.control.length == 2
    assert answer.tolist() == ask(make_cache(LAYERS), positions=0).tolist()
    inner = make_cache(LAYERS[:1])
    with CacheSession.around(inner):
        ask(None, positions=0)
        assert inner.length == 2
        ask(None, positions=2)
        assert inner.length == 4
    assert session.control.length == 2


def test_without_any_cache(cache: MLXSequenceCache) -> None:
    check_refused(cache, NoActiveCacheError, "no cache is active", cache=None)
