"""For every mlx-lm model file: what the config rules say is what the model then caches.

The judge is the model itself, run lazily on one token with mlx-lm's own caches.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

import mlx_kvcache
from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, ModelLayer
from mlx_kvcache.facts.hf.attended import ATTENDED, ATTENDED_WRAPPERS
from mlx_kvcache.facts.hf.families import ALIASES, ARCHITECTURES, FAMILIES
from mlx_kvcache.facts.hf.wrappers import WRAPPERS
from mlx_kvcache.integrations.tracing import TracedGeometry, trace_geometry
from tests import support
from tests.support import family_configs_a_to_h, family_configs_i_to_z
from tests.support.tiny_models import all_families, build

Config = dict[str, Any]

FULL = "full_attention"
DOCS = Path(__file__).parents[2] / "docs" / "model_families.md"
CONFIGS = all_families()
#: Families whose forward pass cannot be traced on a CPU; their caches are compared by kind.
NOT_RUNNABLE = {**family_configs_a_to_h.NOT_RUNNABLE, **family_configs_i_to_z.NOT_RUNNABLE}
#: Fields without a say in what is cached, whatever their names contain.
NO_SAY = re.compile(r"rope_|moe|expert|linear_(num|key|value)|vocab|mlp_|_per_layer")
SAY = re.compile(
    r"hidden_size|head|layer|window|lora|model_dim|n_embd|d_model|kv_|num_loops|loop_|index_"
    r"|mamba_(step|enabled)|pattern|chunk|block|sparse|full_att|n_shared|multi_query|group|dim$"
)


def config_of(family: str) -> Config:
    return copy.deepcopy(CONFIGS[family])


def lazy_model(family: str, config: Config) -> nn.Module:
    """The model with its weights never evaluated, so that its size does not matter."""
    if family == "bitnet":
        # Its packed layers need Metal, or to be unpacked.
        return build(family, config)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    return model


def traced(family: str, config: Config) -> TracedGeometry:
    return trace_geometry(lazy_model(family, config))


def unmarked(geometry: CacheGeometry) -> tuple[LayerGeometry, ...]:
    """The layers without their `shared` marks, which a trace cannot always see."""
    return tuple(replace(layer, shared=False) for layer in geometry.layers)


TRACEABLE = sorted(set(CONFIGS) - set(NOT_RUNNABLE))


def test_the_families_that_cannot_run_here_are_the_known_ones() -> None:
    assert set(NOT_RUNNABLE) == {"muse_spark", "olmo"}
    assert len(TRACEABLE) >= 119


@pytest.mark.parametrize("family", TRACEABLE)
def test_the_rule_is_what_the_model_caches(family: str) -> None:
    config = config_of(family)
    before = copy.deepcopy(config)
    made = CacheGeometry.of_mlx_lm(config)
    assert config == before
    trace = traced(family, config)
    assert unmarked(made) == unmarked(trace.geometry)
    # The list that the model expects, entry for entry: what is recurrent, and what has caches.
    entries = [
        (len(layer.caches), layer.recurrent)
        for layer in trace.geometry.model_layers
        if layer != ModelLayer()
    ]
    owners = [layer for layer in made.model_layers if not layer.shares]
    ours = [(len(layer.caches), layer.recurrent) for layer in owners]
    if family in ("iquestloopcoder", "nanbeige"):
        # One model layer stands at several places of the list.
        assert sum(count for count, _ in ours) == len(entries)
        assert not any(recurrent for _, recurrent in ours)
    else:
        assert [entry for entry in ours if entry != (0, False)] == entries


#: Families whose tiny config has windows that mlx-lm's caches do not keep to.
ATTENDS_LESS = {
    "gemma2",
    "llama4_text",
    "mistral3",
    "mixtral",
    "phi3",
    "phimoe",
    "starcoder2",
}
#: Families whose window counts otherwise in mlx-lm.
ATTENDS_MORE = {"mimo_v2_flash"}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_what_the_model_attends_is_what_mlx_lm_caches_but_for_windows(family: str) -> None:
    config = config_of(family)
    attended, kept = CacheGeometry.from_hf(config), CacheGeometry.of_mlx_lm(config)
    assert attended.model_layers == kept.model_layers
    assert attended.with_windows([0]) == kept.with_windows([0])
    windows = list(zip(attended.windows, kept.windows, strict=True))
    if family in ATTENDS_LESS:
        assert any(attended.windows)
        assert set(kept.windows) == {0}
    elif family in ATTENDS_MORE:
        assert {more - less for more, less in windows} == {0, 1}
    else:
        assert attended == kept


def test_the_families_that_differ_are_the_documented_ones() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## What the model attends\n", 1)[1]
    table = section.split("\n## ", 1)[0]
    names = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))))
    wrapped = {
        name for name, wrapper in ATTENDED_WRAPPERS.items() if wrapper is not WRAPPERS.get(name)
    }
    assert names == set(ATTENDED) | wrapped
    assert names > ATTENDS_LESS | ATTENDS_MORE


@pytest.mark.parametrize("family", TRACEABLE)
def test_marks_of_shared_layers(family: str) -> None:
    config = config_of(family)
    made = [layer.shared for layer in CacheGeometry.of_mlx_lm(config).layers]
    seen = [layer.shared for layer in traced(family, config).geometry.layers]
    if family == "gemma4_text":
        # It hands on the updated arrays instead of reading the cache again.
        assert any(made)
        assert not any(seen)
    else:
        assert made == seen


def test_some_families_do_share() -> None:
    sharing = {
        family
        for family in TRACEABLE
        if any(layer.shared for layer in CacheGeometry.of_mlx_lm(config_of(family)).layers)
    }
    assert sharing == {"afm7", "gemma3n", "gemma4_text"}


def test_muse_spark_by_the_kinds_of_its_caches() -> None:
    config = config_of("muse_spark")
    made = CacheGeometry.of_mlx_lm(config)
    caches = lazy_model("muse_spark", config).make_cache()
    windows = [cache.max_size if isinstance(cache, RotatingKVCache) else 0 for cache in caches]
    assert list(made.windows) == windows
    assert {type(cache) for cache in caches} == {RotatingKVCache, KVCache}
    text = config["text_config"]
    shape = (text["num_key_value_heads"], text["head_dim"], text["head_dim"])
    assert {(each.kv_heads, each.key_dim, each.value_dim) for each in made.layers} == {shape}


def test_olmo_by_its_fields() -> None:
    config = config_of("olmo")
    made = CacheGeometry.of_mlx_lm(config)
    head_dim = config["d_model"] // config["n_heads"]
    assert made.windows == (0,) * config["n_layers"]
    shape = (config["n_heads"], head_dim, head_dim)
    assert {(each.kv_heads, each.key_dim, each.value_dim) for each in made.layers} == {shape}


def test_a_replaced_attention_of_nemotron_nas_owns_no_rows() -> None:
    config = config_of("nemotron-nas")
    kinds = [block["attention"] for block in config["block_configs"]]
    replaced = [index for index, kind in enumerate(kinds) if kind.get("replace_with_linear")]
    assert replaced
    made = CacheGeometry.of_mlx_lm(config)
    for index in replaced:
        assert made.model_layers[index] == ModelLayer()
    # mlx-lm makes a cache for it all the same, which stays mlx-lm's.
    trace = trace_geometry(lazy_model("nemotron-nas", config))
    assert trace.written.count(False) == len(replaced)


# Sensitivity: each field that matters is changed or taken away, and the rule moves with the model.


def paths(config: Config, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in config.items():
        if NO_SAY.search(name):
            continue
        if isinstance(value, dict):
            yield from paths(value, (*prefix, name))
        elif SAY.search(name):
            yield (*prefix, name), value


def changed(config: Config, path: tuple[str, ...], value: Any) -> Config:
    config = copy.deepcopy(config)
    holder = config
    for name in path[:-1]:
        holder = holder[name]
    if value is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return config


def variants(config: Config) -> Iterator[tuple[str, Config]]:
    for path, value in paths(config):
        name = ".".join(path)
        yield f"{name} taken away", changed(config, path, MISSING)
        if isinstance(value, bool):
            yield f"{name} = {not value}", changed(config, path, not value)
        elif isinstance(value, int) and value > 0:
            yield f"{name} = {2 * value}", changed(config, path, 2 * value)
        elif isinstance(value, list) and value:
            yield f"{name} reversed", changed(config, path, value[::-1])


#: Where layer_types says more than the family's own absent field, the rule follows layer_types
#: and mlx-lm its default.
FOLLOWS_LAYER_TYPES = {
    ("cohere2", "sliding_window_pattern taken away"),
    ("prism_hadamard_qwen35", "text_config.full_attention_interval taken away"),
    ("qwen3_5", "text_config.full_attention_interval taken away"),
    ("qwen3_5_moe", "text_config.full_attention_interval taken away"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", TRACEABLE)
def test_the_rule_moves_with_the_model(family: str) -> None:
    config = config_of(family)
    original = unmarked(CacheGeometry.of_mlx_lm(config))
    compared = moved = 0
    for change, variant in variants(config):
        try:
            expected = unmarked(traced(family, variant).geometry)
        except Exception:
            # mlx-lm cannot run this variant, so there is nothing to agree with.
            continue
        try:
            made = unmarked(CacheGeometry.of_mlx_lm(variant))
        except GeometryError:
            # Stricter than mlx-lm is fine: a list of the wrong length, a contradiction.
            continue
        if (family, change) in FOLLOWS_LAYER_TYPES:
            assert made != expected, change
            continue
        assert made == expected, change
        compared += 1
        moved += expected != original
    assert compared >= 2
    assert moved >= 1


JUNK = ["x", "", -1, 0, 1.5, True, None, [], {}, [1], [None], [[]], {"a": 1}, float("nan"), [FULL]]


def all_paths(config: Config, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from all_paths(value, (*prefix, name))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_no_malformed_value_gets_past_the_typed_errors(family: str) -> None:
    config = config_of(family)
    refused = 0
    for path in all_paths(config):
        for value in JUNK:
            try:
                made = CacheGeometry.of_mlx_lm(changed(config, path, value))
            except GeometryError:
                refused += 1
            else:
                assert isinstance(made, CacheGeometry)
    # Layers, heads and dims each refuse most of the list.
    assert refused > 2 * len(JUNK)


# The tables


def test_family_defaults_are_those_of_mlx_lm() -> None:
    checked = 0
    for name, family in FAMILIES.items():
        if name == "olmo":
            continue
        module = importlib.import_module(f"mlx_lm.models.{name}")
        for args in ("TextArgs", "TextModelArgs", "TextConfig", "ModelArgs"):
            if hasattr(module, args):
                break
        defaults = {each.name: each.default for each in fields(getattr(module, args))}
        for standard, value in family.defaults.items():
            own = family.names.get(standard, standard)
            assert defaults[own] == value, (name, own)
            checked += 1
    assert checked > 150


def test_aliases_are_those_of_mlx_lm() -> None:
    for model_type, module in MODEL_REMAPPING.items():
        if (module in WRAPPERS and module not in FAMILIES) or model_type in WRAPPERS:
            assert WRAPPERS[model_type] == WRAPPERS[module]
        else:
            assert ALIASES[model_type] == module
    assert MODEL_ARCHITECTURE_REMAPPING == ARCHITECTURES


def model_files() -> set[str]:
    """The mlx-lm files that a model_type can name: those with a class Model."""
    defines = re.compile(r"^class Model\(|^from \.\w+ import .*\bModel\b *(#.*)?$", re.MULTILINE)
    found = set()
    for folder in mlx_lm.models.__path__:
        for file in Path(folder).glob("*.py"):
            if defines.search(file.read_text(encoding="utf-8")):
                found.add(file.stem)
    return found


def documented(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of the document."""
    section = DOCS.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    names: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            names.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return names


def test_every_model_file_is_covered_or_listed_as_not_covered() -> None:
    not_covered = documented("Not covered")
    covered = documented("Covered")
    assert len(model_files()) > 120
    assert covered | not_covered == model_files()
    assert not covered & not_covered
    assert covered == set(CONFIGS)
    for family in not_covered:
        with pytest.raises(GeometryError):
            CacheGeometry.of_mlx_lm({"model_type": family})


def test_every_rule_belongs_to_a_model_file() -> None:
    assert set(FAMILIES) <= model_files()
    assert set(WRAPPERS) - set(MODEL_REMAPPING) <= model_files()
    assert model_files() <= set(FAMILIES) | set(WRAPPERS)


def test_the_example_of_the_document_is_what_stands_in_the_files() -> None:
    guide = DOCS.read_text(encoding="utf-8").split("## How to add a family\n", 1)[1]
    hf = Path(mlx_kvcache.__file__).parent / "facts" / "hf"
    files = [hf / "families.py", *Path(support.__file__).parent.glob("family_configs_*.py")]
    code = [unspaced(file.read_text(encoding="utf-8")) for file in files]
    shown = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(shown) == 2
    for example in shown:
        assert any(unspaced(example) in text for text in code)
        assert not any(unspaced(example).replace("olmo3", "olmo4") in text for text in code)
    named = set(re.findall(r"`(?:tests/\w+/)?(\w+\.py)`", guide))
    assert {"families.py", "row_shapes.py", "recurrent_rules.py", "test_hf_config.py"} <= named
    for name in named:
        assert (hf / name).is_file() or list(DOCS.parents[1].glob(f"tests/*/{name}")), name


def unspaced(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
