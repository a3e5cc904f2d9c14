"""Metadata: what is written comes back, whole, in plain types, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from mlx_kvcache import read_metadata, write_metadata
from mlx_kvcache.errors import GeometryError, MetadataError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.facts.metadata import VERSION, make_metadata
from tests.support.described_geometry import COLUMNS, GEOMETRY, geometries, metadata, read
from tests.support.tiny_models import all_families


def test_the_error_is_a_geometry_error_and_a_value_error() -> None:
    assert issubclass(MetadataError, GeometryError)
    assert issubclass(MetadataError, ValueError)


def test_the_fixture_in_full() -> None:
    assert GEOMETRY.to_metadata() == metadata()
    assert make_metadata(**COLUMNS) == metadata()
    assert read(metadata()) == GEOMETRY
    assert VERSION == 1


def test_every_field_tells() -> None:
    """Changing any one fact of the metadata changes the geometry that is read."""
    for name in ("kv_heads", "key_dims", "value_dims", "windows"):
        for index in range(3):
            changed = metadata()
            changed[name][index] += 1
            assert read(changed) != GEOMETRY
            assert read(changed).to_metadata() == changed
    for place in [("shared", 0), ("shared", 2)]:
        changed = metadata()
        changed[place[0]][place[1]] ^= True
        assert read(changed) != GEOMETRY
        assert read(changed).to_metadata() == changed
    for index in range(4):
        for flag in ("shares", "recurrent"):
            changed = metadata()
            changed["model_layers"][index][flag] ^= True
            assert read(changed) != GEOMETRY
            assert read(changed).to_metadata() == changed
        changed = metadata()
        changed["model_layers"][index]["caches"].append(1)
        assert read(changed) != GEOMETRY
        assert read(changed).to_metadata() == changed


def test_a_window_of_zero_is_flat_and_any_other_a_ring() -> None:
    changed = metadata()
    changed["windows"] = [1, 0, 10**6]
    assert [layer.policy for layer in read(changed).layers] == [
        LayerPolicy.ring(1),
        LayerPolicy.flat(),
        LayerPolicy.ring(10**6),
    ]


def test_columns_without_a_map_give_each_model_layer_its_own_cache_layer() -> None:
    names = ("kv_heads", "key_dims", "value_dims", "windows")
    made = make_metadata(**{name: COLUMNS[name] for name in names})
    layers = tuple(replace(layer, shared=False) for layer in GEOMETRY.layers)
    assert read(made) == CacheGeometry(layers)


def plain_types(value: Any) -> set[type]:
    if isinstance(value, dict):
        return {dict}.union(*map(plain_types, value), *map(plain_types, value.values()))
    if isinstance(value, list):
        return {list}.union(*map(plain_types, value))
    return {type(value)}


def test_metadata_is_of_plain_json_types_and_a_copy() -> None:
    made = GEOMETRY.to_metadata()
    assert plain_types(made) == {dict, list, str, int, bool}
    made["kv_heads"][0] = 99
    made["model_layers"][0]["caches"].append(1)
    assert GEOMETRY.to_metadata() == metadata()


def test_reading_leaves_the_mapping_as_it_is_and_keeps_nothing_of_it() -> None:
    source = metadata()
    made = CacheGeometry.from_metadata(source)
    assert source == metadata()
    source["kv_heads"][0] = 99
    source["model_layers"][0]["caches"].append(1)
    assert made == GEOMETRY
    assert hash(made) == hash(GEOMETRY)


def test_fields_that_this_version_does_not_know_are_ignored() -> None:
    changed = metadata()
    changed["note"] = {"anything": [1.5]}
    changed["model_layers"][0]["name"] = "attention"
    assert read(changed) == GEOMETRY


@given(geometries(), geometries())
def test_any_geometry_survives_the_round_trip(one: CacheGeometry, other: CacheGeometry) -> None:
    assert read(one.to_metadata()) == one
    assert (one.to_metadata() == other.to_metadata()) == (one == other)


FAMILIES = {name: CacheGeometry.from_hf(config) for name, config in all_families().items()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_survives_the_round_trip(family: str, tmp_path: Path) -> None:
    geometry = FAMILIES[family]
    assert read(geometry.to_metadata()) == geometry
    assert read_metadata(write_metadata(geometry, tmp_path)) == geometry


def test_the_families_use_every_field() -> None:
    layers = [layer for geometry in FAMILIES.values() for layer in geometry.layers]
    model = [layer for geometry in FAMILIES.values() for layer in geometry.model_layers]
    assert len(FAMILIES) >= 120
    assert {layer.policy.kind for layer in layers} == {"flat", "ring"}
    assert {layer.shared for layer in layers} == {False, True}
    assert any(layer.value_dim == 0 for layer in layers)
    assert any(layer.value_dim not in (0, layer.key_dim) for layer in layers)
    assert {len(layer.caches) for layer in model} >= {0, 1, 2}
    assert (
        {layer.shares for layer in model} == {layer.recurrent for layer in model} == {False, True}
    )
