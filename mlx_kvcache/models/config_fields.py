"""A config as transformers saves it, with its fields also under the names that mlx-lm reads.

mlx-lm drops the fields that a family of it does not know, and takes defaults for those that it
misses. A field that was renamed or moved would so be replaced by a default in silence.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

from mlx_kvcache.errors import UnsupportedModelError
from mlx_kvcache.models.rope_fields import rope_fields

Config = Mapping[str, Any]

#: What mlx-lm's multimodal families call the arguments of their text part.
_TEXT_ARGUMENTS = ("TextConfig", "TextArgs", "TextModelArgs")

#: Layer types that mlx-lm knows by other words than those transformers saves.
_KIND_WORDS = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
#: What mlx-lm calls the sizes of full layers where they differ from those of sliding ones.
_FULL_LAYER_SIZES = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}

#: Where families keep after how many layers a full one comes.
_INTERVALS = ("sliding_window_pattern", "full_attention_interval")


def model_fields(config: Config) -> dict[str, Any]:
    """The fields to add to `config` before mlx-lm builds a model from it.

    Raises UnsupportedModelError for what mlx-lm's model of it has no field for, and for a family
    that it does not have; ModelFormatError for fields of another form than theirs.
    """
    from mlx_lm.utils import _get_classes

    if "model_file" in config:
        # The model's own code reads its own config.
        return {}
    model_class, arguments = _get_classes(dict(config))
    module = importlib.import_module(model_class.__module__)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        inner = _text_arguments(module, config)
        return _fields(config, inner or arguments)
    inner = _text_arguments(module, text)
    if inner is None:
        return _fields(config, arguments)
    return {"text_config": {**text, **_fields(text, inner)}}


def _fields(config: Config, arguments: type) -> dict[str, Any]:
    names = frozenset(inspect.signature(arguments).parameters)
    family = arguments.__module__.rpartition(".")[2]
    fields = {
        **_renamed(config, names),
        **_kinds(config, family),
        **_interval(config, names, family),
        **_sizes_of_full_layers(config, names, family),
    }
    return {**fields, **rope_fields({**config, **fields}, names, family)}


def _renamed(config: Config, names: frozenset[str]) -> dict[str, Any]:
    """Missing fields that transformers saves under the other of their two names."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return {}
    pairs = CONFIG_MAPPING[kind].attribute_map
    both = [*pairs.items(), *((real, alias) for alias, real in pairs.items())]
    return {
        name: config[other]
        for name, other in both
        if name in names and name not in config and other in config
    }


def _kinds(config: Config, family: str) -> dict[str, Any]:
    """The layer types under the family's own words, where transformers saves common ones."""
    words = _KIND_WORDS.get(family, {})
    kinds = config.get("layer_types")
    if not words or not isinstance(kinds, list):
        return {}
    return {"layer_types": [words.get(kind, kind) for kind in kinds]}


def _interval(config: Config, names: frozenset[str], family: str) -> dict[str, Any]:
    """After how many layers a full one comes, where mlx-lm counts and transformers lists them."""
    kinds = config.get("layer_types")
    wanted = [name for name in _INTERVALS if name in names]
    if not wanted or "layer_types" in names or not isinstance(kinds, list) or not kinds:
        return {}
    full = [kind == "full_attention" for kind in kinds]
    if family == "exaone4":
        # It wants a letter a layer (which may repeat), or None where all are full.
        if isinstance(config.get(wanted[0]), str):
            return {}
        return {wanted[0]: None if all(full) else "".join("LG"[each] for each in full)}
    interval = full.index(True) + 1 if any(full) else len(full) + 1
    if full != [(index + 1) % interval == 0 for index in range(len(full))]:
        raise UnsupportedModelError(
            f"the layer types of the config ({kinds!r:.80}) are not one full layer after a fixed "
            f"number of others, which is all that mlx-lm's {family} runs"
        )
    return {wanted[0]: interval}


def _sizes_of_full_layers(config: Config, names: frozenset[str], family: str) -> dict[str, Any]:
    """The sizes that transformers saves layer by layer, where mlx-lm has fields for them."""
    layers = config.get("per_layer_config")
    if not layers:
        return {}
    kinds = config.get("layer_types") or []
    full = {str(index) for index, kind in enumerate(kinds) if kind == "full_attention"}
    first, *others = layers.values()
    fields = {_FULL_LAYER_SIZES.get(name, ""): size for name, size in first.items()}
    if set(layers) != full or any(other != first for other in others) or not names >= {*fields}:
        raise UnsupportedModelError(
            f"the config has sizes of single layers ('per_layer_config': {layers!r:.80}), for "
            f"which mlx-lm's {family} has no fields"
        )
    return fields


def _text_arguments(module: ModuleType, text: Config) -> type | None:
    """The arguments of the text part of a multimodal family; None where it has none."""
    from mlx_lm.utils import MODEL_REMAPPING

    for name in _TEXT_ARGUMENTS:
        if hasattr(module, name):
            return cast(type, getattr(module, name))
    if "text_config" not in inspect.signature(module.ModelArgs).parameters:
        return None
    parts = {
        part.__name__.rpartition(".")[2]: part.ModelArgs
        for part in vars(module).values()
        if isinstance(part, ModuleType) and hasattr(part, "ModelArgs")
    }
    kind = str(text.get("model_type"))
    # Of several, mlx-lm takes llama for a text part that it does not know by its type.
    known = parts.get(MODEL_REMAPPING.get(kind, kind)) or parts.get("llama")
    if known is None and len(parts) == 1:
        known = next(iter(parts.values()))
    return known
