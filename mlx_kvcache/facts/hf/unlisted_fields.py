"""Which fields of a config without a rule of its own bear on what is cached.

A list of all harmless fields would never be complete, nor one of all harmful ones. So a name that
speaks of attention or of memory bears on it, unless it is read or known to be harmless.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: The fields that the rule reads.
READ = frozenset(
    (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "layer_types",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
        "max_window_layers",
        "attention_chunk_size",
        "num_kv_shared_layers",
        "per_layer_config",
    )
)

#: What a name contains that speaks of attention, of what is kept, or of another kind of model.
_BEARING = re.compile(
    r"window|sliding|swa|chunk|layer_types|pattern|kv|head|attn|attention|qk|query|key|lora|latent"
    r"|shar|reuse|(^|_)cla($|_)|cross|group|local|global|span|causal|bidirectional|encoder|decoder"
    r"|recurr|ssm|mamba|conv|linear|rwkv|lstm|lru|retention|delta|(^|_)gla($|_)|state|time_step"
    r"|sparse|index|indices|idx|compress|loop|block|cache|memor|segment|stride|dilat|period"
    r"|interval|frequency|per_layer|_layers|_layer_ids|depth|bucket|hash|(^|_)lsh($|_)|relative"
    r"|patch|image_size|type_vocab|channels|mask_token|(^|_)mla($|_)|rnn|yoco|hyena|landmark|ngram"
    r"|mixer|_types$|^types$|^layers$|layer_configs?$|(^|_)att_|attend|value_(size|dim)|shift"
    r"|(^|_)rings?($|_)|sink_(size|tokens)|mqa|gqa|mem_len|same_length|lookback|horizon"
)

#: Fields of layers that keep a state: fine where layer_types says which layers those are.
_STATE = re.compile(
    r"(mamba|ssm|linear|conv|time_step|rwkv|lru)_.*|state_size|d_state|d_conv|attn_layer_period"
    r"|full_attention_interval|full_attn_idxs|layer_group_size"
)

#: Bearing names that change no cache: numbers that act within one position, experts, names of
#: tokens, settings of runs and of training.
_HARMLESS = re.compile(
    r".*(dropout(_prob)?|pdrop|drop_rate|_bias|norm|softcap\w*|softcapping|initializer\w*|init_std)"
    r"|.*(norm_eps\w*|norm_type|init_values?|multiplier|_scale|scale_factor|_scalar|loss\w*)"
    r"|(?!.*(window|kv|head|lora)).*(expert|moe|mlp|ffn|intermediate|rope|rotary).*|embedding_rank"
    r"|(?!mask_token).*_tokens?_(id|ids|index|indices|index_ids|indexes)|_?attn_implementation\w*"
    r"|.*(gate|gating|gated)|attn_temperature_tuning|attention_(in|out)_bias"
    r"|is_decoder|num_beam_groups|(encoder_)?no_repeat_ngram_size"
    r"|output_attentions|output_hidden_states|reshape_hidden_states|use_cache|return_dict"
    r"|n_group|topk_group|n_shared_head_experts|decoder_sparse_step|cache_implementation"
    r"|chunk_size_feed_forward|chunk_size_lm_head|tie_(encoder_decoder|lm_head\w*)|max_position_embeddings"
    r"|num_(dense|nextn_predict|mtp)_layers|hidden_size_per_layer_input|vocab_size_per_layer_input"
    r"|parallel_attn|use_parallel_\w+|clip_qkv|\w*flash_att\w*|\w*softmax_in_fp32|mtp_\w+"
    r"|scale_attn_\w+|reorder_and_upcast_attn|use_linear_bias|linear_bias"
    r"|gradient_checkpointing\w*|embed_scale"
)

#: Model types of encoders, by what their names contain: they attend to both sides.
_ENCODER_TYPE = re.compile(
    r"bert|encoder(?!_decoder)|(vision|audio)(?!.*_text$)|clip|electra|siglip|dino|embedding|(^|_)esm"
    r"|(^|_)(di|bei|dei)?vit($|_)|aimv2|flava|groupvit|owlv|videoprism|privacy_filter"
    r"|t5_?gemma"
)
_ENCODER_ARCHITECTURE = re.compile(r"ForMaskedLM|Encoder(Model)?$")


def bearing_fields(values: Mapping[str, Any], keeps_states: bool) -> Iterator[str]:
    """The names of set fields that bear on what is cached and that nobody reads, sorted.

    A field that is None, False, 0 or empty says nothing. keeps_states: whether layer_types lists
    layers with a state, so that fields of those are understood.
    """
    for name in sorted(name for name, value in values.items() if isinstance(name, str) and value):
        if name in READ or not _BEARING.search(name.lower()):
            continue
        if keeps_states and _STATE.fullmatch(name):
            continue
        if not _HARMLESS.fullmatch(name):
            yield name


def is_encoder(model_type: str, architectures: object) -> bool:
    """Whether the names of the model say that it encodes: it has no next token."""
    named = architectures if isinstance(architectures, (list, tuple)) else (architectures,)
    return bool(_ENCODER_TYPE.search(model_type)) or any(
        isinstance(name, str) and _ENCODER_ARCHITECTURE.search(name) for name in named
    )
