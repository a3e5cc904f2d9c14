"""Geometry and config, facts and choices: what the two must satisfy before a cache is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from mlx_kvcache import MLXSequenceCache, validate
from mlx_kvcache.control.factory import FACTORY
from mlx_kvcache.errors import ConfigError, GeometryError
from mlx_kvcache.facts.config import MAX_CAPACITY, CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry
from tests.support.plain_cache import CONFIG, GEOMETRY

CHECKS: list[Callable[[Any, Any], object]] = [
    validate,
    MLXSequenceCache,
    lambda geometry, config: FACTORY.build("mlx", "sequence", geometry, config),
]
REFUSED = [
    (field, value)
    for field, values in {
        "capacity": [0, -1, MAX_CAPACITY + 1],
        "initial_capacity": [-1, MAX_CAPACITY + 1],
        "spare": [0, -1],
    }.items()
    for value in [*values, True, 8.0, "8"]
] + [("kv_dtype", value) for value in ("int8", "fp16", 4)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_choice_out_of_range_is_named(
    check: Callable[[Any, Any], object], field: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        check(GEOMETRY, replace(CONFIG, **{field: value}))
    assert repr(value) in str(caught.value)
    check(GEOMETRY, CONFIG)


@pytest.mark.parametrize("check", CHECKS)
def test_the_two_may_not_be_swapped_or_missing(check: Callable[[Any, Any], object]) -> None:
    with pytest.raises(GeometryError, match="a CacheGeometry is needed, got CacheConfig"):
        check(CONFIG, GEOMETRY)
    with pytest.raises(ConfigError, match="a CacheConfig is needed, got dict"):
        check(GEOMETRY, {"capacity": 8})


def test_an_initial_capacity_may_be_zero_and_may_exceed_the_capacity() -> None:
    for initial in (0, 32, 33, 5000):
        config = replace(CONFIG, initial_capacity=initial)
        validate(GEOMETRY, config)
        assert MLXSequenceCache(GEOMETRY, config).capacity == 32


def test_facts_and_choices_share_no_field() -> None:
    facts = {field.name for kind in (CacheGeometry, LayerGeometry) for field in fields(kind)}
    choices = {field.name for field in fields(CacheConfig)}
    assert not facts & choices
    assert not {"capacity", "dtype", "kv_dtype"} & facts
    assert not {"capacity", "dtype", "kv_dtype"} & set(GEOMETRY.to_metadata())


def test_choices_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIG.capacity = 0  # type: ignore[misc]


def test_one_layer_does_not_stand_for_many() -> None:
    one = CacheGeometry(GEOMETRY.layers[:1])
    assert len(MLXSequenceCache(one, CONFIG).layers) == 1
    assert len(MLXSequenceCache(GEOMETRY, CONFIG).layers) == 2
