"""Which rule the text part of a wrapper follows: a model file with vision or audio around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_kvcache.facts.hf.families import FAMILIES, Family
from mlx_kvcache.facts.hf.layer_stack import one_cache_a_layer
from mlx_kvcache.facts.hf.layer_types import flat
from mlx_kvcache.facts.hf.row_shapes import either


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
_FLAT_TEXT = Family(one_cache_a_layer(flat, either))

WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        FAMILIES["gemma3_text"], defaults={"num_attention_heads": 8, "num_key_value_heads": 4}
    ),
    "gemma3n": Wrapper(FAMILIES["gemma3n"]),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Wrapper(FAMILIES["gemma4_text"])),
    **dict.fromkeys(("kimi_k25", "kimi_vl"), Wrapper(FAMILIES["deepseek_v3"])),
    "kimi_k3": Wrapper(FAMILIES["kimi_k3"], nested=False),
    "lfm2-vl": Wrapper(FAMILIES["lfm2"]),
    "llama4": Wrapper(FAMILIES["llama4"]),
    "minimax_m3_vl": Wrapper(FAMILIES["minimax_m3_vl"]),
    **dict.fromkeys(
        ("mistral3", "llava"), Wrapper(_FLAT_TEXT, by_text_type={"mistral4": FAMILIES["mistral4"]})
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
