"""Names beside the families' own: aliases, and model files that wrap a text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_kvcache.facts.hf.families import FAMILIES, Family
from mlx_kvcache.facts.hf.layer_map_rules import flat
from mlx_kvcache.facts.hf.row_shapes import either_row

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
    ("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3",
}


@dataclass(frozen=True)
class Wrapper:
    """A model file that runs the text model described by the nested text_config.

    family: the text model's rule; by_text_type: rules for some of its model types instead.
    nested: whether text_config must be there; otherwise the fields may stand at the top.
    defaults: what the wrapper, rather than the text model, supplies for absent fields.
    """

    family: Family
    nested: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    by_text_type: Mapping[str, Family] = field(default_factory=dict)


#: A wrapper that makes no caches itself gives every layer a flat one, also where the text model
#: alone would get rings: the masks still slide, the cache keeps all rows.
_FLAT_TEXT = Family(flat(either_row))

WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        FAMILIES["gemma3_text"],
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3n": Wrapper(FAMILIES["gemma3n"]),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Wrapper(FAMILIES["gemma4_text"])),
    **dict.fromkeys(("kimi_k25", "kimi_vl"), Wrapper(FAMILIES["deepseek_v3"])),
    "kimi_k3": Wrapper(FAMILIES["kimi_k3"], nested=False),
    "lfm2-vl": Wrapper(FAMILIES["lfm2"]),
    "llama4": Wrapper(FAMILIES["llama4"]),
    "minimax_m3_vl": Wrapper(FAMILIES["minimax_m3_vl"]),
    **dict.fromkeys(
        ("mistral3", "llava"),
        Wrapper(_FLAT_TEXT, by_text_type={"mistral4": FAMILIES["mistral4"]}),
    ),
    "muse_glimmer": Wrapper(FAMILIES["muse_glimmer"], nested=False),
    "muse_spark": Wrapper(FAMILIES["muse_spark"]),
    "pixtral": Wrapper(_FLAT_TEXT, defaults={"num_attention_heads": 32}),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Wrapper(FAMILIES["qwen2"], nested=False)),
    "qwen3_vl": Wrapper(FAMILIES["qwen3"], nested=False),
    "qwen3_vl_moe": Wrapper(FAMILIES["qwen3_moe"]),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"),
        Wrapper(FAMILIES["qwen3_5"], nested=False),
    ),
    "deepseek_v41": Wrapper(FAMILIES["deepseek_v41"], nested=False),
}
