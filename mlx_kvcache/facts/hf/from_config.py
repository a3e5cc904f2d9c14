"""From a Hugging Face config to a cache geometry: read it, find the family, apply its rule.

Needs neither mlx nor transformers; a transformers config object is read through its methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mlx_kvcache.errors import GeometryError, ModelNotFoundError, UnknownLayerTypeError
from mlx_kvcache.facts.checks import shortened
from mlx_kvcache.facts.hf.attended import ATTENDED_FAMILIES, ATTENDED_WRAPPERS
from mlx_kvcache.facts.hf.families import ALIASES, ARCHITECTURES, FAMILIES, Family
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_overrides import with_layer_overrides
from mlx_kvcache.facts.hf.layer_stack import Rule
from mlx_kvcache.facts.hf.unlisted_rule import unlisted
from mlx_kvcache.facts.hf.wrappers import WRAPPERS, Wrapper
from mlx_kvcache.facts.json_text import read_json
from mlx_kvcache.facts.layers import LayerMap

#: Where models of several parts have the one that holds their text model.
WRAPPED_PARTS = ("thinker_config", "vlm_config")


@dataclass(frozen=True)
class Tables:
    """Whose answer it is: a family for each model_type, and the wrappers around text models."""

    families: Mapping[str, Family]
    wrappers: Mapping[str, Wrapper]


#: What the model attends.
ATTENDED = Tables(ATTENDED_FAMILIES, ATTENDED_WRAPPERS)
#: What mlx-lm's caches of the model keep.
KEPT_BY_MLX_LM = Tables(
    {**FAMILIES, **{name: FAMILIES[family] for name, family in ALIASES.items()}}, WRAPPERS
)


def layers_from_hf(
    config: Mapping[str, Any] | str | PathLike[str] | object, tables: Tables = ATTENDED
) -> LayerMap:
    """What `CacheGeometry.from_hf` and `of_mlx_lm` answer, each from tables of its own."""
    values = read_config(config)
    model_type = _model_type(values)
    _refuse_encoder_decoder(model_type, values)
    wrapper = tables.wrappers.get(model_type)
    if wrapper is not None:
        return _wrapped(model_type, wrapper, values)
    family = _family(tables, model_type, values)
    text = values.get("text_config")
    if family is None and text is None:
        for name in WRAPPED_PARTS:
            if values.get(name) is not None:
                return layers_from_hf(_section(model_type, name, values[name]), tables)
    if family is None and text is not None:
        text = _section(model_type, "text_config", text)
        model_type = _model_type(text)
        family, values = _family(tables, model_type, text), text
    if family is None:
        return _ruled(unlisted, Fields(values, model_type or "a config without model_type"))
    return _ruled(family.rule, Fields(values, model_type, family.names, family.defaults))


def _ruled(rule: Rule, fields: Fields) -> LayerMap:
    if fields.raw("use_bidirectional_attention") in (True, "all"):
        raise UnknownLayerTypeError(
            f"{fields.family} attends to both sides ('use_bidirectional_attention'): what a token "
            "sees changes with the tokens after it, so that its keys and values can't be kept"
        )
    return with_layer_overrides(fields, rule(fields))


def read_config(config: Mapping[str, Any] | str | PathLike[str] | object) -> Mapping[str, Any]:
    """The config as a mapping, with a text part nested under 'text_config' where it has one."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, PathLike)):
        return _read_file(Path(config))
    return _read_object(config)


def _read_file(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no config at {file}; give the path of a config.json or of the directory "
            "that holds it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise GeometryError(f"the config at {file} cannot be read: {error}") from error
    try:
        values = read_json(text)
    except ValueError as error:
        raise GeometryError(f"the config at {file} is not valid JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise GeometryError(
            f"the config at {file} must be a JSON object, but it is {shortened(values)}"
        )
    return values


def _read_object(config: object) -> Mapping[str, Any]:
    values = _as_mapping(config)
    get_text_config = getattr(config, "get_text_config", None)
    if callable(get_text_config):
        try:
            text = get_text_config()
        except ValueError as error:
            raise GeometryError(
                f"the {type(config).__name__} does not say which of its parts is the text model "
                f"({error}); give that part itself"
            ) from error
    else:
        text = getattr(config, "text_config", None)
    if text is None or text is config:
        return values
    # Nested under whatever name the object has for it; the rules look under this one.
    return {**values, "text_config": _as_mapping(text)}


def _as_mapping(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else None
    if not isinstance(values, Mapping):
        raise GeometryError(
            "a config must be a transformers config object, a mapping, or the path of a "
            f"config.json, got {shortened(config)}"
        )
    return values


def _wrapped(model_type: str, wrapper: Wrapper, values: Mapping[str, Any]) -> LayerMap:
    family, text = wrapper.family, values.get("text_config")
    if text is not None or (wrapper.nested and not _is_text_part(model_type, values)):
        values = _section(model_type, "text_config", text)
        family = wrapper.by_text_type.get(_model_type(values), family)
        model_type = f"{model_type}.text_config"
    defaults = {**family.defaults, **wrapper.defaults}
    return _ruled(family.rule, Fields(values, model_type, family.names, defaults))


def _is_text_part(model_type: str, values: Mapping[str, Any]) -> bool:
    # Some text parts carry the model_type of their wrapper.
    return model_type in FAMILIES and "num_hidden_layers" in values


def _section(model_type: str, name: str, part: object) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise Fields({}, model_type).error(name, part, "an object: the text model")
    return part


def _refuse_encoder_decoder(model_type: str, values: Mapping[str, Any]) -> None:
    if values.get("is_encoder_decoder"):
        raise UnknownLayerTypeError(
            f"{model_type or 'a config without model_type'} is an encoder and a decoder "
            "('is_encoder_decoder'): its layers also keep the encoder's keys and values, which no "
            "cache layer describes. Use the framework's own cache for it"
        )


def _model_type(values: Mapping[str, Any]) -> str:
    model_type = values.get("model_type")
    if model_type is None:
        return ""
    if not isinstance(model_type, str):
        raise GeometryError(
            f"config field 'model_type' must be a string, got {shortened(model_type)}"
        )
    return model_type


def _family(tables: Tables, model_type: str, values: Mapping[str, Any]) -> Family | None:
    listed = values.get("architectures")
    if isinstance(listed, str):
        listed = (listed,)
    fields = Fields({"architectures": listed}, model_type or "a config without model_type")
    for architecture in fields.words("architectures") or ():
        special = ARCHITECTURES.get((model_type, architecture))
        if special is not None:
            return FAMILIES[special]
    return tables.families.get(model_type)
