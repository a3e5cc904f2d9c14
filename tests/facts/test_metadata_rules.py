"""What breaks a rule is refused by the writer, and by the reader on what it is given."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.errors import MetadataError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.facts.metadata import make_metadata
from tests.support.described_geometry import COLUMNS, GEOMETRY, NUMBERS, Metadata, metadata, read

# Each rule: what is changed, where, and what the message says of it.
JUNK: list[tuple[str, Any]] = [
    ("a number in words", "8"),
    ("a float", 8.0),
    ("a bool", True),
    ("nothing", None),
    ("a list", [8]),
    ("not a number", math.nan),
]
LOWEST = {"kv_heads": 1, "key_dims": 1, "value_dims": 0, "windows": 0}
Change = Callable[[Metadata], object]


def entry(name: str, value: Any) -> Change:
    return lambda columns: columns[name].__setitem__(1, value)


def column(name: str, value: Any) -> Change:
    return lambda columns: columns.__setitem__(name, value)


def layer(field: str, value: Any) -> Change:
    return lambda columns: columns["model_layers"][1].__setitem__(field, value)


def rules() -> dict[str, tuple[Change, str]]:
    cases: dict[str, tuple[Change, str]] = {
        "zero heads": (entry("kv_heads", 0), "kv_heads"),
        "negative heads": (entry("kv_heads", -4), "kv_heads"),
        "zero key dim": (entry("key_dims", 0), "key_dims"),
        "negative key dim": (entry("key_dims", -80), "key_dims"),
        "negative value dim": (entry("value_dims", -1), "value_dims"),
        "negative window": (entry("windows", -512), "windows"),
        "no model layers": (column("model_layers", []), "model_layers"),
        "a model layer that is no object": (
            lambda columns: columns["model_layers"].__setitem__(1, [0]),
            "model.layer",
        ),
        "a cache layer too far": (layer("caches", [3]), "caches|cache layers 0 to 2"),
        "a cache layer below 0": (layer("caches", [-1]), "caches|cache layers 0 to 2"),
        "a cache layer that is a bool": (layer("caches", [True]), "caches|cache layers 0 to 2"),
        "a cache layer alone": (layer("caches", 0), "caches"),
        "a map without caches": (
            lambda columns: columns["model_layers"][1].pop("caches"),
            "caches",
        ),
    }
    for name in NUMBERS:
        for words, value in JUNK:
            cases[f"{words} in {name}"] = (entry(name, value), name)
        for words, value in [("a number", 3), ("text", "8,4,2"), ("an object", {"0": 8})]:
            cases[f"{words} for {name}"] = (column(name, value), name)
    for name in (*NUMBERS, "shared"):
        given_values = COLUMNS[name]
        other = "kv_heads" if name != "kv_heads" else "key_dims"
        pattern = f"({name}|{other}).* has [24]"
        cases[f"{name} too short"] = (column(name, given_values[:2]), pattern)
        cases[f"{name} too long"] = (column(name, given_values + given_values[:1]), pattern)
        if name != "kv_heads":
            cases[f"{name} empty"] = (column(name, []), f"{name}.* has 0")
    for words, value in [("a number", 0), ("text", "no"), ("nothing", None)]:
        cases[f"{words} in shared"] = (entry("shared", value), "shared")
        for flag in ("shares", "recurrent"):
            cases[f"{words} for {flag}"] = (layer(flag, value), flag)
    return cases


RULES = rules()


@pytest.mark.parametrize("rule", RULES)
def test_the_writer_refuses(rule: str) -> None:
    change, message = RULES[rule]
    columns = copy.deepcopy(COLUMNS)
    change(columns)
    with pytest.raises(MetadataError, match=message):
        make_metadata(**columns)


@pytest.mark.parametrize("rule", RULES)
def test_the_reader_refuses(rule: str) -> None:
    change, message = RULES[rule]
    changed = metadata()
    change(changed)
    with pytest.raises(MetadataError, match=message):
        read(changed)


@pytest.mark.parametrize("name", ["n_caches", *COLUMNS])
def test_the_reader_names_a_missing_field(name: str) -> None:
    changed = metadata()
    del changed[name]
    with pytest.raises(MetadataError, match=f"lacks {name};"):
        read(changed)
    changed[name] = metadata()[name]
    assert read(changed) == GEOMETRY


def test_the_reader_names_all_missing_fields_at_once() -> None:
    with pytest.raises(MetadataError, match="lacks n_caches, kv_heads, key_dims, value_dims,"):
        read({"version": 1})


@pytest.mark.parametrize("version", [0, 2, -1, "1", 1.0, True, None, [1]])
def test_an_unknown_version_is_refused_before_anything_else(version: Any) -> None:
    with pytest.raises(MetadataError, match="knows version 1"):
        read({"version": version, "kv_heads": "changed its meaning"})
    with pytest.raises(MetadataError, match="knows version 1"):
        read({**metadata(), "version": version})


def test_metadata_without_a_version_is_refused() -> None:
    changed = metadata()
    del changed["version"]
    with pytest.raises(MetadataError, match="lacks version"):
        read(changed)


@pytest.mark.parametrize("count", [0, -3, 2, 4, 3.0, "3", True, None])
def test_the_count_must_be_the_number_of_entries(count: Any) -> None:
    with pytest.raises(MetadataError, match="n_caches"):
        read({**metadata(), "n_caches": count})


def test_empty_metadata_is_refused_on_both_sides() -> None:
    empty: Metadata = {name: [] for name in (*NUMBERS, "shared")}
    with pytest.raises(MetadataError, match=r"n_caches.*got 0"):
        make_metadata(**empty, model_layers=[{"caches": [], "shares": False, "recurrent": True}])
    with pytest.raises(MetadataError, match="n_caches"):
        read({**metadata(), **empty, "n_caches": 0})


@pytest.mark.parametrize("thing", [None, [], "kv_cache.json", 3, GEOMETRY])
def test_only_a_mapping_is_read(thing: Any) -> None:
    with pytest.raises(MetadataError, match="a mapping of fields"):
        CacheGeometry.from_metadata(thing)


def test_the_writer_also_refuses_a_geometry_that_broke_its_own_rules() -> None:
    for field, value in [("kv_heads", 0), ("key_dim", 8.0), ("value_dim", -1), ("shared", 1)]:
        broken = LayerGeometry(LayerPolicy.flat(), 1, 2, 2)
        geometry = CacheGeometry((broken,))
        object.__setattr__(broken, field, value)
        with pytest.raises(MetadataError, match=field):
            geometry.to_metadata()
    policy = LayerPolicy.ring(4)
    geometry = CacheGeometry((LayerGeometry(policy, 1, 2, 2),))
    object.__setattr__(policy, "window", -4)
    with pytest.raises(MetadataError, match="windows"):
        geometry.to_metadata()


ENTRIES = st.one_of(
    st.integers(-2, 4),
    st.integers(1, 2**40),
    st.sampled_from([None, True, False, 1.0, 0.5, "1", [], [1], {}]),
)


@given(
    name=st.sampled_from([*NUMBERS, "shared", "caches", "shares", "recurrent"]),
    index=st.integers(0, 2),
    value=ENTRIES,
)
def test_writer_and_reader_agree_on_every_entry(name: str, index: int, value: Any) -> None:
    columns = copy.deepcopy(COLUMNS)
    if name in columns:
        columns[name][index] = value
    else:
        columns["model_layers"][index][name] = value
    try:
        written = make_metadata(**columns)
    except MetadataError:
        written = None
    try:
        geometry = read({"version": 1, "n_caches": 3, **columns})
    except MetadataError:
        assert written is None
    else:
        assert written is not None
        assert geometry.to_metadata() == written
    if name in LOWEST:
        assert (written is not None) == (type(value) is int and value >= LOWEST[name])
