"""Which rule each model family follows: one entry for each mlx-lm model file.

What a family caches is what its file in mlx-lm's `models` does, so the entries carry the same
names. A default stands here only where mlx-lm has it and a config.json may leave the field out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_kvcache.errors import GeometryError, UnknownLayerTypeError
from mlx_kvcache.facts.hf import attention_rules as attention
from mlx_kvcache.facts.hf import layer_map_rules as layer_map
from mlx_kvcache.facts.hf import recurrent_rules as recurrent
from mlx_kvcache.facts.hf import row_shapes as row
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_stack import Rule, one_cache_a_layer
from mlx_kvcache.facts.hf.layer_types import (
    HYBRID,
    SLIDING,
    KindsOf,
    by_layer_types,
    every_nth,
    flat,
    required_layer_types,
)
from mlx_kvcache.facts.hf.row_shapes import ShapeOf
from mlx_kvcache.facts.layers import LayerMap


@dataclass(frozen=True)
class Family:
    """A rule, what the family's absent fields stand for, and what it calls the standard fields."""

    rule: Rule
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def _each(
    kinds: KindsOf,
    shape: ShapeOf,
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> Family:
    """A family whose layers own one cache at most, in this order of kinds and of one row shape."""
    return Family(one_cache_a_layer(kinds, shape), defaults or {}, names or {})


#: A family of flat layers of one row shape.
_flat = partial(_each, flat)


def _refused(error: type[GeometryError], reason: str) -> Family:
    def rule(fields: Fields) -> LayerMap:
        raise error(f"{fields.family} {reason}; use mlx-lm's own cache for it")

    return Family(rule)


def _sizes(
    layers: int, hidden: int, heads: int, kv: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
    }
    return {name: value for name, value in sizes.items() if value is not None}


_GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
}
_MPT_NAMES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK = {**_sizes(30, 4096, 32, 32), **_MLA}

FAMILIES: Mapping[str, Family] = {
    # Every layer flat; head_dim is hidden_size // num_attention_heads.
    **dict.fromkeys(
        [
            "Klear",
            "apertus",
            "bailing_moe",
            "granite",
            "granitemoe",
            "helium",
            "hunyuan",
            "internlm2",
            "internlm3",
            "mimo",
            "minicpm",
            "phi3",
            "phi3small",
            "qwen2",
            "qwen2_moe",
            "stablelm",
            "starcoder2",
        ],
        _flat(row.derived),
    ),
    "cohere": _flat(row.derived, _sizes(40, 8192, 64, 64)),
    "deepseek": _flat(row.derived, _sizes(30, 4096, 32, 32)),
    "mixtral": _flat(row.derived, _sizes(32, 4096, 32, 8)),
    "nanochat": _flat(row.derived, _sizes(20, 1280, 10, 10)),
    "phi": _flat(row.derived, _sizes(32, 2560, 32, 32)),
    "phimoe": _flat(row.derived, _sizes(32, 4096, 32, 8)),
    "lille-130m": _flat(row.derived, names={**_GPT2_NAMES, "num_key_value_heads": "n_kv_heads"}),
    "gpt_neox": _flat(row.mha),
    "gpt2": _flat(row.mha, names=_GPT2_NAMES),
    "gptj": _flat(row.mha, _sizes(28, 4096, 16), _GPT2_NAMES),
    "gpt_bigcode": _flat(row.bigcode, {"multi_query": True}, _GPT2_NAMES),
    "olmo": _flat(row.mha, names=_MPT_NAMES),
    "dbrx": _flat(row.dbrx, names=_MPT_NAMES),
    "phixtral": _flat(
        row.mha,
        _sizes(32, 2560, 32),
        {
            "num_hidden_layers": "num_layers",
            "hidden_size": "model_dim",
            "num_attention_heads": "num_heads",
        },
    ),
    "plamo": Family(attention.plamo, {"n_shared_head": 8}),
    # Every layer flat; head_dim may be given.
    **dict.fromkeys(
        [
            "bitnet",
            "dots1",
            "ernie4_5",
            "ernie4_5_moe",
            "glm",
            "glm4",
            "glm4_moe",
            "hunyuan_v1_dense",
            "minimax",
            "nemotron",
            "olmo2",
            "olmoe",
            "qwen3_moe",
            "smollm3",
            "telechat3",
        ],
        _flat(row.either),
    ),
    "exaone": _flat(row.either, names={"num_hidden_layers": "num_layers"}),
    # Every layer flat; head_dim must be given.
    **dict.fromkeys(
        ["gemma", "gemma2", "llama4_text", "qwen3", "seed_oss", "solar_open"], _flat(row.given)
    ),
    "talkie": _flat(row.mha_given, _sizes(40, 5120, 40, head_dim=128)),
    "qwen": _flat(row.mha_given, _sizes(24, 2048, 16, head_dim=128), {"head_dim": "kv_channels"}),
    "openelm": Family(attention.openelm, names={"num_hidden_layers": "num_transformer_layers"}),
    # Every layer flat; MLA, its latent cached.
    "deepseek_v3": _flat(row.latent, _DEEPSEEK),
    "glm4_moe_lite": _flat(
        row.latent, {**_sizes(47, 2048, 20, 20), "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    ),
    "mistral4": _flat(row.latent),
    # Every layer flat; MLA, cached expanded.
    "deepseek_v2": _flat(row.expanded, _DEEPSEEK),
    "youtu_llm": _flat(row.expanded, {**_sizes(32, 2048, 16, 16), **_MLA}),
    "minicpm3": _flat(row.minicpm3),
    # Two cache layers a model layer.
    "deepseek_v32": Family(
        layer_map.several_caches(row.latent, layer_map.indexer),
        {**_DEEPSEEK, "index_head_dim": 128},
    ),
    "glm_moe_dsa": Family(layer_map.several_caches(row.latent, layer_map.indexer)),
    "longcat_flash": Family(
        layer_map.several_caches(row.latent, row.latent), names={"num_hidden_layers": "num_layers"}
    ),
    "longcat_flash_ngram": Family(
        layer_map.several_caches(row.latent, row.latent, leading_state=1),
        names={"num_hidden_layers": "num_layers"},
    ),
    "minimax_m3_vl": Family(layer_map.minimax_m3, _sizes(60, 6144, 64, 4, 128)),
    # Several passes over the layers.
    "iquestloopcoder": Family(layer_map.iquestloopcoder, {"loop_num": 2, "loop_window_size": 64}),
    "nanbeige": Family(layer_map.nanbeige, {"num_loops": 1}),
    # layer_types, all full where the list is absent.
    **dict.fromkeys(("llama", "ministral3"), _each(by_layer_types(), row.either)),
    "mellum": _each(by_layer_types(), row.given),
    "laguna": _each(
        by_layer_types(), row.given, {**_sizes(40, 2048, 48, 8, 128), "sliding_window": 512}
    ),
    "gear": _each(
        by_layer_types(("flat", "ring", "recurrent")), row.given, {"sliding_window": 512}
    ),
    # layer_types, which the model can't do without.
    "exaone_moe": _each(required_layer_types(SLIDING), row.either),
    "muse_spark": _each(required_layer_types(SLIDING), row.given),
    "afmoe": _each(
        required_layer_types(SLIDING),
        row.given,
        {**_sizes(32, 2048, 32, 4, 64), "sliding_window": 2048},
    ),
    # layer_types, with a default of the family's own.
    "olmo3": _each(by_layer_types(period=4), row.either),
    "spark2_5": _each(by_layer_types(period=4), row.given),
    "muse_glimmer": _each(
        by_layer_types(period=4),
        row.given,
        {**_sizes(52, 6656, 32, 2, 128), "sliding_window": 2048},
    ),
    "gpt_oss": _each(
        attention.gpt_oss_kinds, row.given, {**_sizes(36, 2880, 64, 8, 64), "sliding_window": 128}
    ),
    "step3p5": Family(
        attention.step3p5, {"sliding_window": 512}, {"num_key_value_heads": "num_attention_groups"}
    ),
    # A pattern.
    "gemma3_text": _each(
        every_nth("sliding_window_pattern", "ring"),
        row.given,
        {**_sizes(26, 1152, 4, 1, 256), "sliding_window": 512, "sliding_window_pattern": 6},
    ),
    "cohere2": _each(
        every_nth("sliding_window_pattern", "ring"),
        row.given,
        {**_sizes(32, 4096, 32, 8, 128), "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "plamo3": Family(
        attention.plamo3,
        {**_sizes(32, 4096, 32, 4, 128), "window_size": 2048, "sliding_window_pattern": 8},
    ),
    "exaone4": _each(attention.exaone4_kinds, row.either),
    "mimo_v2_flash": Family(attention.mimo_v2_flash),
    "llama4": _each(attention.llama4_kinds, row.either),
    # Layers that read another layer's keys and values.
    "gemma3n": Family(layer_map.gemma3n),
    "gemma4_text": Family(
        layer_map.gemma4,
        {
            **_sizes(35, 1536, 8, 1, 256),
            "global_head_dim": 512,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
        },
    ),
    "afm7": Family(
        layer_map.afm7,
        names={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_dim",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
        },
    ),
    # Recurrent layers among attention layers.
    "qwen3_next": _each(
        every_nth("full_attention_interval", "recurrent"), row.given, {"full_attention_interval": 4}
    ),
    "qwen3_5": _each(
        every_nth("full_attention_interval", "recurrent"),
        row.either,
        {**_sizes(32, 4096, 32, 8), "full_attention_interval": 4},
    ),
    "olmo_hybrid": _each(by_layer_types(HYBRID, 4, "recurrent"), row.either),
    "kimi_linear": _each(recurrent.kimi_kinds, row.kimi_linear),
    "kimi_k3": _each(recurrent.kimi_kinds, row.latent, _sizes(93, 7168, 96, 96)),
    "bailing_hybrid": _each(recurrent.bailing_kinds, row.latent),
    "bailing_moe_linear": _each(recurrent.bailing_kinds, row.either),
    "bailing_moe_v3": _each(
        recurrent.bailing_kinds, row.latent, {**_sizes(24, 1536, 16), **_MLA, "layer_group_size": 4}
    ),
    "lfm2": _each(recurrent.lfm2_kinds, row.derived),
    "lfm2_moe": _each(recurrent.lfm2_kinds, row.derived),
    "granitemoehybrid": _each(required_layer_types(HYBRID), row.derived),
    "jamba": _each(recurrent.jamba_kinds, row.derived),
    "nemotron_h": _each(recurrent.nemotron_h_kinds, row.either),
    "nemotron-nas": Family(recurrent.nemotron_nas, _sizes(80, 8192, 64)),
    "plamo2": _each(
        recurrent.plamo2_kinds,
        row.given,
        {**_sizes(32, 4096, 32, 4, 128), "mamba_step": 2, "mamba_enabled": True},
        {"head_dim": "hidden_size_per_head"},
    ),
    "recurrent_gemma": Family(recurrent.recurrent_gemma),
    "baichuan_m1": Family(recurrent.baichuan_m1),
    "falcon_h1": Family(recurrent.falcon_h1, _sizes(36, 1024, 8, 2, 64)),
    # Nothing for this cache to hold, or a cache of the family's own.
    **dict.fromkeys(
        ("mamba", "mamba2", "rwkv7"),
        _refused(
            GeometryError,
            "is purely recurrent: it keeps a state of fixed size and no keys or values, so this "
            "cache has nothing to hold",
        ),
    ),
    "deepseek_v41": _refused(
        UnknownLayerTypeError,
        "has no rule here: it caches a window, compressed groups and index keys in a cache of its "
        "own",
    ),
}

#: model_type -> the family whose rule it follows: mlx-lm's own remapping, model files that only
#: re-use another one, and the names that transformers gives to the text part of a wrapper.
ALIASES: Mapping[str, str] = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "deepseek_v41_text": "deepseek_v41",
    "gemma3n_text": "gemma3n",
    "gemma4_unified_text": "gemma4_text",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "muse_spark_text": "muse_spark",
    "minimax_m3_vl_text": "minimax_m3_vl",
}

#: (model_type, architecture) -> family, where the model_type alone does not say.
ARCHITECTURES: Mapping[tuple[str, str], str] = {
    ("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"
}
