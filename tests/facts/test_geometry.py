"""The geometry's own invariants, and that the integer side needs neither mlx nor numpy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from mlx_kvcache.errors import GeometryError, KVCacheError, UnknownLayerTypeError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer
from tests.support.processes import run_python

FLAT = LayerGeometry(LayerPolicy.flat(), kv_heads=2, key_dim=8, value_dim=8)
RING = LayerGeometry(LayerPolicy.ring(16), kv_heads=2, key_dim=8, value_dim=8)


def test_errors_are_also_the_builtin_that_a_user_expects() -> None:
    assert issubclass(GeometryError, KVCacheError)
    assert issubclass(GeometryError, ValueError)
    assert issubclass(UnknownLayerTypeError, GeometryError)


@pytest.mark.parametrize(
    ("kind", "window", "message"),
    [
        ("flat", 1, "window 0"),
        ("ring", 0, ">= 1, got 0"),
        ("ring", -4, ">= 1, got -4"),
        ("ring", True, "got True"),
        ("ring", 4.0, "got 4.0"),
        ("ring", "4", "got '4'"),
        ("paged", 4, "'paged'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(kind: str, window: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        LayerPolicy(kind, window)  # type: ignore[arg-type]


def test_a_window_of_zero_stands_for_flat() -> None:
    assert LayerPolicy.from_window(0) == LayerPolicy.flat() == LayerPolicy("flat")
    assert LayerPolicy.from_window(7) == LayerPolicy.ring(7) != LayerPolicy.ring(8)
    with pytest.raises(GeometryError, match="-1"):
        LayerPolicy.from_window(-1)


@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim", "name"),
    [
        (0, 8, 8, "kv_heads"),
        (-1, 8, 8, "kv_heads"),
        (2, 0, 8, "key_dim"),
        (2, 8, -1, "value_dim"),
        (2.0, 8, 8, "kv_heads"),
        (True, 8, 8, "kv_heads"),
        (2, "8", 8, "key_dim"),
        (2, 8, None, "value_dim"),
    ],
)
def test_a_layer_of_impossible_shape_is_refused_by_name(
    heads: object, key_dim: object, value_dim: object, name: str
) -> None:
    with pytest.raises(GeometryError, match=name):
        LayerGeometry(LayerPolicy.flat(), heads, key_dim, value_dim)  # type: ignore[arg-type]


def test_elements_count_keys_and_values_of_all_heads() -> None:
    assert LayerGeometry(LayerPolicy.flat(), 3, 24, 16).elements_per_position == 3 * 40
    assert LayerGeometry(LayerPolicy.flat(), 1, 32, 0).elements_per_position == 32


def test_a_geometry_without_layers_is_refused() -> None:
    with pytest.raises(GeometryError, match="purely recurrent"):
        CacheGeometry(())


def test_without_a_map_each_model_layer_reads_its_own_cache_layer() -> None:
    geometry = CacheGeometry((FLAT, RING))
    assert geometry.model_layers == (ModelLayer((0,)), ModelLayer((1,)))
    assert geometry.windows == (0, 16)


@pytest.mark.parametrize("index", [2, -1])
def test_a_map_to_a_missing_cache_layer_is_refused(index: int) -> None:
    with pytest.raises(GeometryError, match=f"cache layer {index}"):
        CacheGeometry((FLAT, RING), (ModelLayer((0,)), ModelLayer((index,))))


def test_other_windows_make_a_copy() -> None:
    geometry = CacheGeometry((FLAT, RING), (ModelLayer((0,)), ModelLayer((1,)), ModelLayer()))
    other = geometry.with_windows([4, 0])
    assert other.windows == (4, 0)
    assert geometry.windows == (0, 16)
    assert other.model_layers == geometry.model_layers
    assert geometry.with_windows([3]).windows == (0, 3)
    with pytest.raises(GeometryError, match="has none"):
        other.with_windows([0, 0]).with_windows([3])


@pytest.mark.parametrize(("windows", "message"), [([1, 2, 3], "3 windows"), ([-1], "-1")])
def test_windows_that_do_not_fit_are_refused(windows: list[int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        CacheGeometry((FLAT, RING)).with_windows(windows)


def test_a_geometry_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CacheGeometry((FLAT,)).layers = ()  # type: ignore[misc]


CLEAN_IMPORT = """
import sys
import mlx_kvcache.facts.geometry, mlx_kvcache.facts.config
import mlx_kvcache.facts.hf.from_config, mlx_kvcache.layout
from mlx_kvcache.facts.geometry import CacheGeometry
CacheGeometry.from_hf({"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2})
heavy = {"mlx", "numpy", "mlx_lm", "transformers"} & {name.split(".")[0] for name in sys.modules}
print(sorted(heavy))
"""


def test_the_integer_side_imports_without_mlx_and_numpy() -> None:
    def loaded(code: str) -> str:
        run = run_python(code)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert loaded(CLEAN_IMPORT) == "[]"
    # The check does see them where they are imported.
    assert loaded("import numpy, mlx.core" + CLEAN_IMPORT) == "['mlx', 'numpy']"
