"""Families whose models attend to other rows than mlx-lm's caches keep, by their models.

mlx-lm gives most of these flat caches, whatever windows the config sets, and attends to all of it.
The orders here are those of transformers' model files, with their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlx_kvcache.facts.hf import row_shapes as row
from mlx_kvcache.facts.hf.attention_rules import mimo_v2_flash
from mlx_kvcache.facts.hf.families import ALIASES, FAMILIES, Family
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_map_rules import gemma4
from mlx_kvcache.facts.hf.layer_stack import one_cache_a_layer
from mlx_kvcache.facts.hf.layer_types import (
    ATTENTION,
    SLIDING,
    KindsOf,
    MemoryKind,
    all_of,
    listed_kinds,
)
from mlx_kvcache.facts.hf.row_shapes import ShapeOf
from mlx_kvcache.facts.hf.unlisted_rule import unlisted
from mlx_kvcache.facts.hf.wrappers import WRAPPERS, Wrapper
from mlx_kvcache.facts.layers import LayerMap


def _every_layer(fields: Fields) -> tuple[MemoryKind, ...]:
    """mistral and others: every layer slides once a window is set."""
    slides = fields.optional_integer("sliding_window") is not None
    return listed_kinds(fields, SLIDING) or all_of("ring" if slides else "flat", fields.layer_count)


def _switched(fields: Fields) -> bool:
    return fields.flag("use_sliding_window") and fields.given("sliding_window")


def _upper_layers(fields: Fields) -> tuple[MemoryKind, ...]:
    """qwen2, qwen3: with use_sliding_window, the layers from max_window_layers on slide."""
    return listed_kinds(fields, SLIDING) or _from_first(fields, _switched(fields))


def _from_first(fields: Fields, slides: bool) -> tuple[MemoryKind, ...]:
    count, first = fields.layer_count, fields.integer("max_window_layers", 0)
    return tuple("ring" if slides and index >= first else "flat" for index in range(count))


def _dots1_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """dots1: as qwen2, without a switch."""
    return listed_kinds(fields, SLIDING) or _from_first(
        fields, fields.raw("sliding_window") is not None
    )


def _qwen2_moe_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """qwen2_moe: with use_sliding_window, every other layer below max_window_layers slides."""
    count, end = fields.layer_count, fields.integer("max_window_layers", 0)
    slides = _switched(fields)
    return listed_kinds(fields, SLIDING) or tuple(
        "ring" if slides and index % 2 == 0 and index < end else "flat" for index in range(count)
    )


def _qwen3_moe_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """qwen3_moe: every layer slides with use_sliding_window."""
    kind: MemoryKind = "ring" if _switched(fields) else "flat"
    return listed_kinds(fields, SLIDING) or all_of(kind, fields.layer_count)


def _gemma2_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """gemma2: sliding and full in turn."""
    return listed_kinds(fields, SLIDING) or tuple(
        "flat" if index % 2 else "ring" for index in range(fields.layer_count)
    )


def _rotated(fields: Fields) -> tuple[bool, ...]:
    """no_rope_layers has a 1 for each layer *with* a rotary embedding; by default three of four."""
    count = fields.layer_count
    if not fields.raw("no_rope_layers"):
        period = fields.integer("no_rope_layer_interval")
        return tuple((index + 1) % period != 0 for index in range(count))
    listed = fields.integers("no_rope_layers")
    if len(listed) != count:
        raise fields.error("no_rope_layers", listed, f"a list of {count} times 0 or 1")
    return tuple(bool(item) for item in listed)


def _smollm3_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """smollm3: with use_sliding_window, the layers without a rotary embedding slide."""
    slides = _switched(fields)
    return listed_kinds(fields, SLIDING) or tuple(
        "ring" if slides and not rotated else "flat" for rotated in _rotated(fields)
    )


def _llama4_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """llama4: the layers with a rotary embedding attend in chunks, where a chunk size is set."""
    chunks = fields.optional_integer("attention_chunk_size") is not None
    return listed_kinds(fields, ATTENTION) or tuple(
        "chunk" if chunks and rotated else "flat" for rotated in _rotated(fields)
    )


def _gemma4(fields: Fields) -> LayerMap:
    """gemma4: absent fields mean no shared layers, and every sixth layer and the last full."""
    read: dict[str, Any] = {"num_kv_shared_layers": 0, **fields.values}
    if not fields.given("layer_types") and not fields.given("sliding_window_pattern"):
        numbers = range(1, fields.layer_count + 1)
        is_full = [number % 6 == 0 or number == fields.layer_count for number in numbers]
        read["layer_types"] = [
            "full_attention" if full else "sliding_attention" for full in is_full
        ]
    return gemma4(replace(fields, values=read))


def _mimo_v2_flash(fields: Fields) -> LayerMap:
    """mimo_v2_flash: sliding_window_size counts the positions *before* the query.

    A config that transformers saved has layer_types and a sliding_window that counts the query;
    its sliding layers have twice the KV heads.
    """
    read = dict(fields.values)
    if fields.given("sliding_window_size"):
        read["sliding_window_size"] = fields.integer("sliding_window_size") + 1
    else:
        read["sliding_window_size"] = fields.raw("sliding_window")
    if not fields.given("hybrid_layer_pattern"):
        kinds = listed_kinds(fields, SLIDING) or ()
        read["hybrid_layer_pattern"] = [int(kind == "ring") for kind in kinds]
        saved = {
            "swa_num_key_value_heads": 2 * row.kv_heads(fields),
            "swa_head_dim": fields.raw("head_dim"),
            "swa_v_head_dim": fields.raw("v_head_dim"),
        }
        read = {**saved, **read}
    return mimo_v2_flash(replace(fields, values=read))


def _family(
    name: str, kinds: KindsOf, shape: ShapeOf, defaults: Mapping[str, Any] | None = None
) -> Family:
    known = FAMILIES[name]
    rule = one_cache_a_layer(kinds, shape)
    return replace(known, rule=rule, defaults={**known.defaults, **(defaults or {})})


_FROM_28 = {"max_window_layers": 28}
_NO_ROPE = {"no_rope_layer_interval": 4}
_CHUNKED = {**_NO_ROPE, "attention_chunk_size": 8192}

#: model_type -> its family, where that differs from the one in `FAMILIES`.
ATTENDED: Mapping[str, Family] = {
    "mistral": _family("llama", _every_layer, row.either),
    "ministral3": _family("ministral3", _every_layer, row.either),
    "mixtral": _family("mixtral", _every_layer, row.derived),
    "phi3": _family("phi3", _every_layer, row.derived),
    "phimoe": _family("phimoe", _every_layer, row.derived),
    "starcoder2": _family("starcoder2", _every_layer, row.derived),
    **dict.fromkeys(
        ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
        _family("qwen2", _upper_layers, row.derived, _FROM_28),
    ),
    "qwen3": _family("qwen3", _upper_layers, row.given, _FROM_28),
    "qwen2_moe": _family("qwen2_moe", _qwen2_moe_kinds, row.derived, _FROM_28),
    "qwen3_moe": _family("qwen3_moe", _qwen3_moe_kinds, row.either),
    "dots1": _family(
        "dots1", _dots1_kinds, row.either, {"max_window_layers": 62, "sliding_window": 4096}
    ),
    "gemma2": _family("gemma2", _gemma2_kinds, row.given, {"sliding_window": 4096}),
    "smollm3": _family("smollm3", _smollm3_kinds, row.either, _NO_ROPE),
    "llama4_text": _family("llama4_text", _llama4_kinds, row.given, _CHUNKED),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"), replace(FAMILIES["gemma4_text"], rule=_gemma4)
    ),
    "mimo_v2_flash": Family(_mimo_v2_flash),
}

#: model_type -> the family of what the model attends.
ATTENDED_FAMILIES: Mapping[str, Family] = {
    **FAMILIES,
    **{name: FAMILIES[family] for name, family in ALIASES.items()},
    **ATTENDED,
}

#: Around any text model, whose own model_type says what it attends.
_ANY_TEXT = Wrapper(Family(unlisted), by_text_type=ATTENDED_FAMILIES)

#: Wrappers of what the model attends.
ATTENDED_WRAPPERS: Mapping[str, Wrapper] = {
    **WRAPPERS,
    **dict.fromkeys(("llava", "mistral3"), _ANY_TEXT),
    "pixtral": replace(_ANY_TEXT, defaults=WRAPPERS["pixtral"].defaults),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Wrapper(ATTENDED["qwen2"], nested=False)),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Wrapper(ATTENDED["gemma4_text"])),
    "llama4": Wrapper(_family("llama4", _llama4_kinds, row.either, _CHUNKED)),
}
