"""A config as transformers 5 saves it gives the model that its former config gave, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.utils import _decode_tagged_floats
from transformers import CONFIG_MAPPING

import mlx_kvcache.models as models
from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.models.config_fields import model_fields
from mlx_kvcache.models.rope_fields import READ_WHOLE, SCALINGS_FOLLOWED, UNROTATED
from tests.support.gguf_files import Tiny, write
from tests.support.tiny_models import all_families, build, random_tokens

Config = dict[str, Any]

FAMILIES = all_families()
#: Importing olmo ends the process; see its entry in the tiny configs.
IMPORTABLE = sorted(set(FAMILIES) - {"olmo"})
SAVED = [f for f in IMPORTABLE if FAMILIES[f]["model_type"] in CONFIG_MAPPING]
MOVED = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct")
BASES = ("rope_theta", "rotary_emb_base")
#: Families that never read a base, at the top or elsewhere, though their configs may have one.
WITHOUT_BASE = {"jamba", "kimi_k3", "nemotron_h", "phi3small", "plamo2", "qwen"}

#: What transformers makes of a tiny config that is no question of where fields are kept.
NOT_SAVED = {
    "llama4": "it wants a bool where the hub's config has a number",
    "mimo_v2_flash": "it sets other bases than those of the tiny config beside them",
    "muse_glimmer": "it takes the text part from its own defaults",
    "muse_spark": "it wants an audio part that fits",
    "olmo3": "it gives sliding layers a base of its own, so the layers differ",
    "step3p5": "it saves head counts of single layers, which is refused",
}

#: Families whose fields do not tell: they read `rope_parameters` by themselves, or a field under
#: each of several names.
BY_LOGITS = ("gemma4", "minimax_m3_vl", "mistral3", "nemotron_h", "qwen3_vl")

#: Others whose logits are compared too.
PLAIN = ("cohere2", "deepseek_v3", "exaone4", "gemma3", "gemma4_text", "gpt_oss", "llama")
PLAIN += ("granitemoehybrid", "phimoe", "qwen2", "qwen3_moe", "qwen3_vl_moe")


def text_of(config: Config) -> Config:
    return config.get("text_config") or config


def nested(config: Config, **changes: Any) -> Config:
    """`config` with its rotary fields in `rope_parameters` alone."""
    text = text_of(config)
    base = next(text[name] for name in BASES if name in text)
    parameters = {**(text.get("rope_scaling") or {"rope_type": "default"}), "rope_theta": base}
    for name in ("partial_rotary_factor", "rotary_pct"):
        if name in text:
            parameters["partial_rotary_factor"] = text[name]
    moved = {name: value for name, value in text.items() if name not in MOVED}
    moved["rope_parameters"] = {**parameters, **changes}
    return moved if text is config else {**config, "text_config": moved}


def put(config: Config) -> Config:
    return {**config, **model_fields(copy.deepcopy(config))}


def saved(config: Config) -> Config:
    """The config.json that transformers writes of `config`, as mlx-lm reads it."""
    config = copy.deepcopy(config)
    if "rope_parameters" in text_of(config):
        for name in ("rope_theta", "rope_scaling"):
            text_of(config).pop(name, None)
            config.pop(name, None)
    own = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    return _decode_tagged_floats(json.loads(own.to_json_string(use_diff=True)))


def over(new: Config, old: Config) -> Config:
    """`old`, with what only `new` has."""
    merged = dict(new)
    for name, value in old.items():
        inside = isinstance(value, dict) and isinstance(new.get(name), dict)
        merged[name] = over(new[name], value) if inside else value
    return merged


def arguments(family: str, config: Config) -> Config:
    """What mlx-lm's family reads of a config, with the two spellings of a scaling made one."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    read = module.ModelArgs.from_dict(copy.deepcopy(config))
    return _alike({f.name: getattr(read, f.name) for f in dataclasses.fields(read)})


def _alike(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, dict):
        return value
    alike = {k: _alike(v) for k, v in value.items() if k != "rope_parameters"}
    scaling = alike.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        plain = kind in ("default", "mrope")
        kept = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", "rope_theta")}
        alike["rope_scaling"] = None if plain else {**kept, "rope_type": kind}
    return alike


def same_rope(family: str, old: Config, new: Config) -> None:
    """Fail unless both say the same; of a text part, only its rotary fields are compared."""
    if "text_config" not in old:
        assert arguments(family, new) == arguments(family, old)
        return
    text, given = _alike(old["text_config"]), _alike(new["text_config"])
    for name in (*MOVED, "rope_local_base_freq", "num_experts", "global_head_dim"):
        # A missing scaling and none are the same.
        assert given.get(name) == text.get(name), name


def with_base() -> list[str]:
    named = [f for f in IMPORTABLE if set(BASES) & set(text_of(FAMILIES[f]))]
    return [f for f in named if "rope_parameters" not in text_of(FAMILIES[f])]


@pytest.mark.parametrize(
    "family", sorted({*with_base()} - WITHOUT_BASE - UNROTATED - {"muse_spark", *BY_LOGITS})
)
def test_every_family_reads_nested_rotary_fields(family: str) -> None:
    config = FAMILIES[family]
    same_rope(family, config, put(nested(config)))
    base = next(text_of(config)[name] for name in BASES if name in text_of(config))
    other = put(nested(config, rope_theta=[7.0] if isinstance(base, list) else base * 7))
    with pytest.raises(AssertionError):
        same_rope(family, config, other)


@pytest.mark.parametrize("family", sorted(WITHOUT_BASE))
def test_a_base_that_a_family_does_not_read_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="rope_theta"):
        put(nested(FAMILIES[family]))


@pytest.mark.parametrize("family", [f for f in SAVED if f not in NOT_SAVED and f not in BY_LOGITS])
def test_what_transformers_saves(family: str) -> None:
    """All its fields, renamed ones too; the former names are put over them for comparison."""
    new = saved(FAMILIES[family])
    old = over(new, FAMILIES[family])
    if "rope_parameters" not in text_of(FAMILIES[family]):
        text_of(old).pop("rope_parameters", None)
    given = put(new)
    if family == "internlm3":
        # Both names of one field; mlx-lm reads either.
        old |= {name: given[name] for name in ("qkv_bias", "bias")}
    same_rope(family, old, given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [*BY_LOGITS, *PLAIN],
)
def test_logits_of_what_transformers_saves(family: str) -> None:
    def logits(config: Config) -> bytes:
        model = build(family, config)
        return np.array(model(mx.array([random_tokens(config, 24)])).astype(mx.float32)).tobytes()

    new = saved(FAMILIES[family])
    old = over(new, FAMILIES[family])
    if "rope_parameters" not in text_of(FAMILIES[family]):
        text_of(old).pop("rope_parameters", None)
    expected = logits(old)
    assert logits(put(new)) == expected
    parameters = copy.deepcopy(text_of(new).get("rope_parameters") or {})
    for part in [v for v in parameters.values() if isinstance(v, dict)] or [parameters]:
        part["rope_theta"] = 77.0
    text_of(new)["rope_parameters"] = parameters
    if family not in ("granitemoehybrid", "nemotron_h"):  # These have no rotary positions.
        assert logits(put(new)) != expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_from_disk(family: str, tmp_path: Path, cache_home: Path) -> None:
    """Through `load`: both forms give the same logits, another base or factor gives others."""
    directory = Path(shutil.copytree(converted(family, tmp_path), tmp_path / "hf"))
    config = json.loads((directory / "config.json").read_text())

    def logits(**changes: Any) -> bytes:
        (directory / "config.json").write_text(json.dumps({**config, **changes}))
        model, _ = models.load(directory)
        return np.array(model(mx.array([[5, 90, 17, 200, 33, 8, 61]]))).tobytes()

    scaling = {"rope_type": "linear", "factor": 4.0}
    for name in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern"):
        config.pop(name, None)
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 500.0}
        old = {"rope_theta": 2e4, "rope_scaling": scaling, "rope_local_base_freq": 500.0}
        old["sliding_window_pattern"] = 3

        def new(theta: float = 2e4, factor: float = 4.0) -> Config:
            full = {"rope_theta": theta, "rope_type": "linear", "factor": factor}
            return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    else:
        old = {"rope_theta": 2e4, "rope_scaling": scaling}

        def new(theta: float = 2e4, factor: float = 4.0) -> Config:
            full = {"rope_theta": theta, "rope_type": "linear", "factor": factor}
            return {"rope_parameters": full}

    expected = logits(**old)
    assert logits(**new()) == expected
    assert logits(**new(theta=3e4)) != expected
    assert logits(**new(factor=2.0)) != expected
    assert cache_home.is_dir()


def converted(family: str, tmp_path: Path) -> Path:
    return models.resolve(write(tmp_path / "t.gguf", Tiny(family)))


def test_what_mlx_lm_would_leave_out_is_refused() -> None:
    for config, word in (
        (nested(FAMILIES["starcoder2"], rope_type="yarn", factor=4.0), "rope_scaling"),
        ({**FAMILIES["starcoder2"], "rope_scaling": {"type": "linear", "factor": 2}}, "scaling"),
        ({**FAMILIES["qwen3_moe"], "rope_scaling": {"type": "yarn", "factor": 4}}, "qwen3_moe"),
        (nested(FAMILIES["llama"], partial_rotary_factor=0.5), "partial_rotary_factor"),
        ({**FAMILIES["llama"], "rope_parameters": by_kind(1e4, 5e5)}, "differ"),
        ({**FAMILIES["olmo3"], "rope_parameters": by_kind(1e4, 5e5)}, "differ"),
        ({**FAMILIES["gemma3_text"], "rope_parameters": by_kind(1e4, 5e5, "linear")}, "sliding"),
        ({**FAMILIES["llama"], "per_layer_config": {"0": {"head_dim": 4}}}, "single layers"),
        ({**FAMILIES["cohere2"], "layer_types": ["full_attention", "x", "x"]}, "fixed number"),
        ({**FAMILIES["llama"], "model_type": "nothing"}, "nothing"),
    ):
        with pytest.raises((UnsupportedModelError, ValueError), match=word):
            put(config)
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ModelFormatError, match=name):
            put({**FAMILIES["llama"], name: [1]})


def by_kind(full: float, sliding: float, kind: str = "default") -> Config:
    parts = {"full_attention": full, "sliding_attention": sliding}
    return {k: {"rope_theta": v, "rope_type": kind, "factor": 2.0} for k, v in parts.items()}


def test_layer_types_become_an_interval() -> None:
    s, f = "sliding_attention", "full_attention"
    kinds = [s, s, f, s, s, f, s]
    assert put({**FAMILIES["cohere2"], "layer_types": kinds})["sliding_window_pattern"] == 3
    kinds = [s, s]
    assert put({**FAMILIES["cohere2"], "layer_types": kinds})["sliding_window_pattern"] == 3
    exaone = {k: v for k, v in FAMILIES["exaone4"].items() if k != "sliding_window_pattern"}
    assert put({**exaone, "layer_types": [f, s, f]})["sliding_window_pattern"] == "GLG"
    assert put({**exaone, "layer_types": [f]})["sliding_window_pattern"] is None


def test_what_was_asked_for_goes_first(tmp_path: Path, cache_home: Path) -> None:
    directory = converted("llama", tmp_path)
    assert cache_home in directory.parents
    base = models.load(directory)[0].args.rope_theta
    parameters = {"rope_theta": base * 2, "rope_type": "default"}
    model, _ = models.load(directory, model_config={"rope_parameters": parameters})
    assert model.args.rope_theta == base * 2
    changes = {"rope_parameters": parameters, "rope_theta": 7.0}
    assert models.load(directory, model_config=changes)[0].args.rope_theta == 7.0


def test_every_rotary_field_of_mlx_lm_is_known() -> None:
    """A family that is new, or reads another field, is looked at before it is trusted."""
    known = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    known |= {"rotary_emb_base", "rotary_pct", "rotary_dim", "rope_traditional"}
    known |= {"rope_local_base_freq", "rope_local_theta", "swa_rope_theta"}
    #: Those that transformers keeps where they are, or has no family for.
    known |= {"rope_freq_constant", "rope_embedding_base", "rope_position_scale", "rotary_type"}
    known |= {"qk_rope_head_dim", "compress_rope_theta", "layer_rope_theta", "no_rope_layers"}
    known |= {"global_partial_rotary_factor", "partial_rotary_factors", "no_rope_layer_interval"}
    known |= {"rope_interleave", "indexer_rope_interleave"}
    found: dict[str, set[str]] = {}
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        if info.name == "olmo":
            continue
        module = importlib.import_module(f"mlx_lm.models.{info.name}")
        for name, value in vars(module).items():
            if inspect.isclass(value) and re.search("Args|Config$", name):
                found.setdefault(info.name, set()).update(inspect.signature(value).parameters)
    rotary = {n for names in found.values() for n in names if re.search("rope|rotary", n)}
    assert rotary - known == set()
    base_only = {"exaone_moe", "granitemoehybrid", "lfm2", "lfm2_moe", "muse_glimmer"}
    readers = {family for family, names in found.items() if "rope_parameters" in names}
    assert readers == (READ_WHOLE - {"dbrx"}) | base_only | {"olmo_hybrid"}
    assert all("rope_scaling" in found[family] for family in SCALINGS_FOLLOWED)
