"""Geometries and configs that cannot make a cache, each refused by name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import ConfigError, GeometryError, KVCacheError
from mlx_kvcache.facts.config import MAX_CAPACITY, CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer
from tests.support.sequence_oracle import simple_geometry

NOT_INTEGERS = [None, "8", 1.0, 1.5, True, False, [4], mx.array(4)]


@pytest.mark.parametrize("field", ["capacity", "initial_capacity", "spare"])
@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1, -(2**40), MAX_CAPACITY + 1, 2**70], ids=repr)
def test_a_config_field_out_of_range(field: str, value: Any) -> None:
    config = CacheConfig(**{field: value})
    for call in (validate, MLXSequenceCache):
        with pytest.raises(ConfigError, match=field):
            call(simple_geometry(0, 4), config)


@pytest.mark.parametrize(("field", "accepted"), [("capacity", 1), ("initial_capacity", 0)])
def test_the_least_value_of_a_field_is_accepted(field: str, accepted: int) -> None:
    cache = MLXSequenceCache(simple_geometry(0, 4), CacheConfig(**{field: accepted}))
    cache.layer(0).update_and_fetch(mx.ones((1, 2, 1, 3)), mx.ones((1, 2, 1, 2)))
    assert cache.length == 1
    if accepted == 1:
        with pytest.raises(ConfigError, match=field):
            validate(simple_geometry(0), CacheConfig(**{field: 0}))


def test_no_spare_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="spare"):
        MLXSequenceCache(simple_geometry(0), CacheConfig(spare=0))


@pytest.mark.parametrize(
    "value", ["int8", "float64", "", "Float32", "bf16", 16, True, mx.float16, ["float16"]], ids=repr
)
def test_an_unknown_storage_dtype(value: Any) -> None:
    with pytest.raises(ConfigError, match="kv_dtype"):
        MLXSequenceCache(simple_geometry(0), CacheConfig(kv_dtype=value))


@pytest.mark.parametrize("value", [{}, {"capacity": 5}, 5, "config"], ids=repr)
def test_a_config_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="CacheConfig"):
        MLXSequenceCache(simple_geometry(0), value)


@pytest.mark.parametrize("value", [None, {}, [], 5, "llama", LayerPolicy.flat()], ids=repr)
def test_a_geometry_that_is_none(value: Any) -> None:
    with pytest.raises(GeometryError, match="CacheGeometry"):
        MLXSequenceCache(value)


@pytest.mark.parametrize("value", ["ints", "ARRAY", "1", "true"])
def test_an_unknown_start_form(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_KVCACHE_START", value)
    with pytest.raises(ConfigError, match="MLX_KVCACHE_START"):
        MLXSequenceCache(simple_geometry(0))


@pytest.mark.parametrize("field", ["kv_heads", "key_dim", "value_dim"])
@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1], ids=repr)
def test_a_layer_of_no_shape(field: str, value: Any) -> None:
    fields = {"kv_heads": 1, "key_dim": 1, "value_dim": 1, field: value}
    with pytest.raises(GeometryError, match=field):
        LayerGeometry(LayerPolicy.flat(), **fields)


def test_only_values_may_be_empty() -> None:
    assert LayerGeometry(LayerPolicy.flat(), 2, 3, 0).elements_per_position == 6
    for heads, key_dim in ((0, 1), (1, 0)):
        with pytest.raises(GeometryError):
            LayerGeometry(LayerPolicy.flat(), heads, key_dim, 1)


@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1, 0], ids=repr)
def test_a_ring_of_no_window(value: Any) -> None:
    with pytest.raises(GeometryError, match="window"):
        LayerPolicy.ring(value)


@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1], ids=repr)
def test_a_window_that_is_none(value: Any) -> None:
    with pytest.raises(GeometryError, match="window"):
        LayerPolicy.from_window(value)


@pytest.mark.parametrize(
    ("kind", "window"), [("flat", 4), ("flat", -1), ("chunk", 4), ("", 0), (None, 0), ("ring", 0)]
)
def test_a_policy_of_no_kind(kind: Any, window: int) -> None:
    with pytest.raises(GeometryError):
        LayerPolicy(kind, window)


@pytest.mark.parametrize("policy", [None, "flat", 4, LayerPolicy], ids=repr)
def test_a_layer_of_no_policy(policy: Any) -> None:
    with pytest.raises(GeometryError, match="policy"):
        LayerGeometry(policy, 1, 1, 1)


@pytest.mark.parametrize("layers", [(), [], (None,), ("flat",), 5, None], ids=repr)
def test_a_geometry_of_no_layers(layers: Any) -> None:
    with pytest.raises(GeometryError):
        CacheGeometry(layers)


@pytest.mark.parametrize("index", [-1, 1, 99, "0", None, 0.0, True], ids=repr)
def test_a_model_layer_that_reads_no_cache(index: Any) -> None:
    with pytest.raises(GeometryError, match="model layer"):
        CacheGeometry(simple_geometry(0).layers, (ModelLayer((index,)),))


@pytest.mark.parametrize("windows", [[], [1, 2], [1, 2, 3, 4], [0, -1, 0], [1, "2", 3], [True]])
def test_windows_that_do_not_fit_leave_the_geometry(windows: list[Any]) -> None:
    geometry = simple_geometry(0, 4, 8)
    with pytest.raises(GeometryError):
        geometry.with_windows(windows)
    assert geometry.windows == (0, 4, 8)


@pytest.mark.parametrize("windows", [5, None, 2.5], ids=repr)
def test_windows_that_are_no_list(windows: Any) -> None:
    with pytest.raises(KVCacheError):
        simple_geometry(0, 4).with_windows(windows)


def test_windows_are_replaced_in_a_copy() -> None:
    geometry = simple_geometry(0, 4, 8)
    assert geometry.with_windows([7]).windows == (0, 7, 7)
    assert geometry.with_windows((1, 0, 2)).windows == (1, 0, 2)
    assert geometry.windows == (0, 4, 8)


def test_facts_cannot_be_changed() -> None:
    geometry = simple_geometry(4)
    for owner, field in (
        (geometry, "layers"),
        (geometry.layers[0], "kv_heads"),
        (geometry.layers[0].policy, "window"),
        (CacheConfig(), "capacity"),
        (ModelLayer(), "caches"),
    ):
        with pytest.raises(AttributeError):
            setattr(owner, field, 1)
