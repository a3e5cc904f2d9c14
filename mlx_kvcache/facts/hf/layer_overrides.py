"""What `per_layer_config` says of single layers, put over what the family's rule answered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.layers import LayerGeometry, LayerMap, LayerPolicy, ModelLayer

#: The fields that are read; of the others only those that have no say in what is cached pass.
READ = ("head_dim", "num_key_value_heads", "sliding_window")
NO_SAY = re.compile(r"intermediate_size|expert|moe|mlp|dropout|bias|rope|hidden_act|norm|scal")


def with_layer_overrides(fields: Fields, found: LayerMap) -> LayerMap:
    """The layers with the KV heads, head dims and windows that `per_layer_config` gives them.

    A layer that reads another's rows has those of their owner. Raises `GeometryError` for a key
    that names no layer, `UnknownLayerTypeError` for a field that is not known or not the layer's.
    """
    layers = list(found.layers)
    for index, own in _overrides(fields, len(found.model_layers)):
        model_layer = found.model_layers[index]
        if not model_layer.shares and model_layer.caches:
            cache = _only_cache(own, model_layer)
            layers[cache] = _overridden(fields, own, layers[cache])
    return replace(found, layers=tuple(layers))


def _overrides(fields: Fields, count: int) -> Iterator[tuple[int, Fields]]:
    """(layer, its fields) in the order of the config; keys are integers or digits ("05")."""
    if not fields.raw("per_layer_config"):
        return
    section = fields.section("per_layer_config")
    seen: set[int] = set()
    for key, values in section.values.items():
        text = str(key)
        index = int(text) if text.isdecimal() else -1
        if not 0 <= index < count or index in seen:
            raise fields.error("per_layer_config", key, f"keyed by layers, 0 to {count - 1}, once")
        seen.add(index)
        if not isinstance(values, Mapping):
            raise section.error(text, values, "an object with fields of its own")
        own = Fields(values, f"{section.family}[{index}]")
        for name, value in values.items():
            if name not in READ and value and not NO_SAY.search(str(name)):
                raise _unknown(own, name)
        yield index, own


def _only_cache(own: Fields, layer: ModelLayer) -> int:
    if len(layer.caches) > 1:
        raise _unknown(own, next(iter(own.values), "per_layer_config"))
    return layer.caches[0]


def _overridden(fields: Fields, own: Fields, layer: LayerGeometry) -> LayerGeometry:
    heads, dim = own.optional_integer("num_key_value_heads"), own.optional_integer("head_dim")
    if (heads or dim) and layer.key_dim != layer.value_dim:
        raise _unknown(own, "num_key_value_heads" if heads else "head_dim")
    return LayerGeometry(
        _policy(fields, own, layer.policy),
        heads or layer.kv_heads,
        dim or layer.key_dim,
        dim or layer.value_dim,
        layer.shared,
    )


def _policy(fields: Fields, own: Fields, policy: LayerPolicy) -> LayerPolicy:
    """layer_types say whether a layer slides, `sliding_window` only how far."""
    if "sliding_window" not in own.values:
        return policy
    window = own.optional_integer("sliding_window")
    if policy.kind == "flat" and (window is None or fields.given("layer_types")):
        return policy
    if policy.kind == "flat" or window is None or not fields.given("sliding_window"):
        raise own.error("sliding_window", window, "given to layers that 'layer_types' call sliding")
    return LayerPolicy.ring(window)


def _unknown(own: Fields, name: str) -> UnknownLayerTypeError:
    return UnknownLayerTypeError(
        f"{own.family} gives the layer a {name!r} of its own ({own.values.get(name)!r}), and how "
        "its rows then look is not known. Trace the loaded model instead "
        "(mlx_kvcache.integrations.tracing), or add a rule (docs/model_families.md)"
    )
