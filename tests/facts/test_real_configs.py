"""Public models: `from_hf` says the layers that their own descriptions say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import CacheGeometry
from tests.facts.real_configs import FLAT_IN_MLX_LM, REAL, REFUSED, Layer


def layers_of(geometry: CacheGeometry) -> list[Layer]:
    """The geometry in the words of the hand-written lists."""
    made = []
    for entry in geometry.model_layers:
        rows = tuple(
            (layer.policy.window, layer.kv_heads, layer.key_dim, layer.value_dim)
            for layer in (geometry.layers[index] for index in entry.caches)
        )
        if entry.shares:
            made.append(Layer(reads=entry.caches[0], state=entry.recurrent))
        else:
            made.append(Layer(rows, state=entry.recurrent))
    return made


def test_there_are_enough_of_them() -> None:
    assert len(REAL) >= 60
    assert len({config["model_type"] for config, _ in REAL.values()}) >= 40


@pytest.mark.parametrize("name", REAL)
def test_the_layers_are_those_of_the_description(name: str, tmp_path: Path) -> None:
    config, layers = REAL[name]
    geometry = CacheGeometry.from_hf(config)
    assert layers_of(geometry) == layers
    # Which layers own which caches, in order.
    owned = [index for entry in geometry.model_layers if not entry.shares for index in entry.caches]
    assert owned == list(range(len(geometry.layers)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CacheGeometry.from_hf(tmp_path) == geometry


@pytest.mark.parametrize("name", REAL)
def test_mlx_lm_keeps_the_same_or_all(name: str) -> None:
    config, layers = REAL[name]
    kept, attended = CacheGeometry.of_mlx_lm(config), CacheGeometry.from_hf(config)
    if name in FLAT_IN_MLX_LM:
        assert any(attended.windows)
        assert kept == attended.with_windows([0])
    elif name == "MiMo-V2-Flash":
        assert kept == attended.with_windows([window and window - 1 for window in attended.windows])
    else:
        assert layers_of(kept) == layers


def test_only_models_of_the_same_layers_have_the_same_geometry() -> None:
    """So that a rule that answered the same for two models would be seen."""
    made = {name: layers_of(CacheGeometry.from_hf(config)) for name, (config, _) in REAL.items()}
    for one, layers in made.items():
        same = {name for name, (_, written) in REAL.items() if written == layers}
        assert same == {name for name in REAL if made[name] == layers}, one
    assert len({tuple(layers) for layers in made.values()}) > 70


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_no_rule_describes_are_refused(name: str) -> None:
    config, word = REFUSED[name]
    with pytest.raises(GeometryError, match=word):
        CacheGeometry.from_hf(config)
