"""Which rule each model family follows: one entry for each mlx-lm model file.

What a family caches is what its file in mlx-lm's `models` does, so the entries carry the same
names. A default stands here only where mlx-lm has it and a config.json may leave the field out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.facts.hf.attention_rules import (
    afm7,
    exaone4,
    gemma4,
    gpt_oss,
    iquestloopcoder,
    llama4,
    mimo_v2_flash,
    minimax_m3,
    nanbeige,
    openelm,
    plamo,
    plamo3,
    step3p5,
)
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_map_rules import (
    Rule,
    beside_recurrent,
    by_layer_types,
    every_nth,
    flat,
    full_indices,
    grouped,
    kda_layers,
    purely_recurrent,
    shared_kv,
    three_to_one,
    twice,
    with_indexer,
)
from mlx_kvcache.facts.hf.layer_types import every
from mlx_kvcache.facts.hf.recurrent_rules import (
    baichuan_m1,
    granitemoehybrid,
    jamba,
    nemotron_h,
    nemotron_nas,
    plamo2,
    recurrent_gemma,
)
from mlx_kvcache.facts.hf.row_shapes import (
    bigcode_row,
    dbrx_row,
    derived_row,
    either_row,
    expanded_row,
    given_row,
    kimi_linear_row,
    latent_row,
    mha_given_row,
    mha_row,
    minicpm3_row,
)


@dataclass(frozen=True)
class Family:
    """A rule, what the family's absent fields stand for, and what it calls the standard fields."""

    rule: Rule
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def _unsupported(reason: str) -> Rule:
    def rule(fields: Fields) -> CacheGeometry:
        raise UnknownLayerTypeError(
            f"{fields.family} has no rule here: {reason}. Use mlx-lm's own cache for it"
        )

    return rule


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

_DERIVED = Family(flat(derived_row))
_EITHER = Family(flat(either_row))
_GIVEN = Family(flat(given_row))
_MHA = Family(flat(mha_row))
_TYPED_EITHER = Family(by_layer_types(either_row))
_TYPED_GIVEN = Family(by_layer_types(given_row))
_RECURRENT = Family(purely_recurrent)

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
        _DERIVED,
    ),
    "cohere": Family(flat(derived_row), _sizes(40, 8192, 64, 64)),
    "deepseek": Family(flat(derived_row), _sizes(30, 4096, 32, 32)),
    "mixtral": Family(flat(derived_row), _sizes(32, 4096, 32, 8)),
    "nanochat": Family(flat(derived_row), _sizes(20, 1280, 10, 10)),
    "phi": Family(flat(derived_row), _sizes(32, 2560, 32, 32)),
    "phimoe": Family(flat(derived_row), _sizes(32, 4096, 32, 8)),
    "lille-130m": Family(
        flat(derived_row), names={**_GPT2_NAMES, "num_key_value_heads": "n_kv_heads"}
    ),
    "gpt_neox": _MHA,
    "gpt2": Family(flat(mha_row), names=_GPT2_NAMES),
    "gptj": Family(flat(mha_row), _sizes(28, 4096, 16), _GPT2_NAMES),
    "gpt_bigcode": Family(flat(bigcode_row), {"multi_query": True}, _GPT2_NAMES),
    "olmo": Family(flat(mha_row), names=_MPT_NAMES),
    "dbrx": Family(flat(dbrx_row), names=_MPT_NAMES),
    "phixtral": Family(
        flat(mha_row),
        _sizes(32, 2560, 32),
        {
            "num_hidden_layers": "num_layers",
            "hidden_size": "model_dim",
            "num_attention_heads": "num_heads",
        },
    ),
    "plamo": Family(plamo, {"n_shared_head": 8}),
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
        _EITHER,
    ),
    "exaone": Family(flat(either_row), names={"num_hidden_layers": "num_layers"}),
    # Every layer flat; head_dim must be given.
    **dict.fromkeys(
        [
            "gemma",
            "gemma2",
            "llama4_text",
            "qwen3",
            "seed_oss",
            "solar_open",
        ],
        _GIVEN,
    ),
    "talkie": Family(flat(mha_given_row), _sizes(40, 5120, 40, head_dim=128)),
    "qwen": Family(
        flat(mha_given_row), _sizes(24, 2048, 16, head_dim=128), {"head_dim": "kv_channels"}
    ),
    "openelm": Family(openelm, names={"num_hidden_layers": "num_transformer_layers"}),
    # Every layer flat; MLA, its latent cached.
    "deepseek_v3": Family(flat(latent_row), _DEEPSEEK),
    "glm4_moe_lite": Family(
        flat(latent_row), {**_sizes(47, 2048, 20, 20), "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    ),
    "mistral4": Family(flat(latent_row)),
    # Every layer flat; MLA, cached expanded.
    "deepseek_v2": Family(flat(expanded_row), _DEEPSEEK),
    "youtu_llm": Family(flat(expanded_row), {**_sizes(32, 2048, 16, 16), **_MLA}),
    "minicpm3": Family(flat(minicpm3_row)),
    # Two cache layers a model layer.
    "deepseek_v32": Family(with_indexer(latent_row), {**_DEEPSEEK, "index_head_dim": 128}),
    "glm_moe_dsa": Family(with_indexer(latent_row)),
    "longcat_flash": Family(twice(latent_row), names={"num_hidden_layers": "num_layers"}),
    "longcat_flash_ngram": Family(
        twice(latent_row, leading_state=1), names={"num_hidden_layers": "num_layers"}
    ),
    "minimax_m3_vl": Family(minimax_m3, _sizes(60, 6144, 64, 4, 128)),
    # Several passes over the layers.
    "iquestloopcoder": Family(iquestloopcoder, {"loop_num": 2, "loop_window_size": 64}),
    "nanbeige": Family(nanbeige, {"num_loops": 1}),
    # layer_types, all full where the list is absent.
    **dict.fromkeys(("exaone_moe", "llama", "ministral3"), _TYPED_EITHER),
    **dict.fromkeys(("mellum", "muse_spark"), _TYPED_GIVEN),
    "afmoe": Family(
        by_layer_types(given_row), {**_sizes(32, 2048, 32, 4, 64), "sliding_window": 2048}
    ),
    "laguna": Family(
        by_layer_types(given_row), {**_sizes(40, 2048, 48, 8, 128), "sliding_window": 512}
    ),
    "gear": Family(
        by_layer_types(given_row, allowed=("flat", "ring", "recurrent")), {"sliding_window": 512}
    ),
    # layer_types, with a default of the family's own.
    "olmo3": Family(by_layer_types(either_row, three_to_one)),
    "spark2_5": Family(by_layer_types(given_row, three_to_one)),
    "muse_glimmer": Family(
        by_layer_types(given_row, three_to_one),
        {**_sizes(52, 6656, 32, 2, 128), "sliding_window": 2048},
    ),
    "gpt_oss": Family(gpt_oss, {**_sizes(36, 2880, 64, 8, 64), "sliding_window": 128}),
    "step3p5": Family(
        step3p5, {"sliding_window": 512}, {"num_key_value_heads": "num_attention_groups"}
    ),
    # A pattern.
    "gemma3_text": Family(
        every_nth(given_row, "sliding_window_pattern", "ring"),
        {**_sizes(26, 1152, 4, 1, 256), "sliding_window": 512, "sliding_window_pattern": 6},
    ),
    "cohere2": Family(
        every_nth(given_row, "sliding_window_pattern", "ring"),
        {**_sizes(32, 4096, 32, 8, 128), "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "plamo3": Family(
        plamo3,
        {**_sizes(32, 4096, 32, 4, 128), "window_size": 2048, "sliding_window_pattern": 8},
    ),
    "exaone4": Family(exaone4),
    "mimo_v2_flash": Family(mimo_v2_flash),
    "llama4": Family(llama4),
    # Layers that read another layer's keys and values.
    "gemma3n": Family(shared_kv),
    "gemma4_text": Family(
        gemma4,
        {
            **_sizes(35, 1536, 8, 1, 256),
            "global_head_dim": 512,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
        },
    ),
    "afm7": Family(
        afm7,
        names={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_dim",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
        },
    ),
    # Recurrent layers among attention layers.
    "qwen3_next": Family(
        every_nth(given_row, "full_attention_interval", "recurrent"),
        {"full_attention_interval": 4},
    ),
    "qwen3_5": Family(
        every_nth(either_row, "full_attention_interval", "recurrent"),
        {**_sizes(32, 4096, 32, 8), "full_attention_interval": 4},
    ),
    "olmo_hybrid": Family(
        by_layer_types(
            either_row,
            lambda count: every(4, count, "recurrent"),
            ("flat", "recurrent"),
        )
    ),
    "kimi_linear": Family(kda_layers(kimi_linear_row)),
    "kimi_k3": Family(kda_layers(latent_row), _sizes(93, 7168, 96, 96)),
    "bailing_hybrid": Family(grouped(latent_row)),
    "bailing_moe_linear": Family(grouped(either_row)),
    "bailing_moe_v3": Family(
        grouped(latent_row), {**_sizes(24, 1536, 16), **_MLA, "layer_group_size": 4}
    ),
    "lfm2": Family(full_indices(derived_row)),
    "lfm2_moe": Family(full_indices(derived_row)),
    "granitemoehybrid": Family(granitemoehybrid),
    "jamba": Family(jamba),
    "nemotron_h": Family(nemotron_h),
    "nemotron-nas": Family(nemotron_nas, _sizes(80, 8192, 64)),
    "plamo2": Family(
        plamo2,
        {
            **_sizes(32, 4096, 32, 4, 128),
            "mamba_step": 2,
            "mamba_enabled": True,
        },
        {"head_dim": "hidden_size_per_head"},
    ),
    "recurrent_gemma": Family(recurrent_gemma),
    "baichuan_m1": Family(baichuan_m1),
    "falcon_h1": Family(beside_recurrent(given_row), _sizes(36, 1024, 8, 2, 64)),
    # Nothing for this cache to hold, or a cache of the family's own.
    **dict.fromkeys(("mamba", "mamba2", "rwkv7"), _RECURRENT),
    "deepseek_v41": Family(
        _unsupported("it caches a window, compressed groups and index keys in a cache of its own")
    ),
}
