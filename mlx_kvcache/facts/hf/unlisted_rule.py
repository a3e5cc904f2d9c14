"""The rule for a model_type that has no entry of its own: what the standard fields say.

Only a config made of standard fields gets a geometry. A field that speaks of another kind of
memory (a state space, a latent, shared projections) is refused, never taken for plain attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_stack import stack_kinds
from mlx_kvcache.facts.hf.layer_types import MemoryKind, all_of, by_pattern, listed_kinds
from mlx_kvcache.facts.hf.row_shapes import with_global
from mlx_kvcache.facts.layers import LayerMap

#: Fields of layers that keep a state: fine where layer_types says which layers those are.
STATE_PREFIXES = ("mamba_", "ssm_", "linear_", "conv_", "time_step_", "rwkv_", "lru_")
STATE_FIELDS = (
    "state_size",
    "d_state",
    "d_conv",
    "attn_layer_period",
    "full_attention_interval",
    "full_attn_idxs",
    "layer_group_size",
)
#: Fields of caching rules that no standard field describes.
UNKNOWN_FIELDS = (
    "kv_lora_rank",
    "index_topk",
    "index_head_dim",
    "compress_ratios",
    "sparse_attention_config",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "layers_block_type",
    "block_types",
    "block_configs",
    "sliding_window_layers",
    "sliding_window_size",
    "attention_window_size",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "num_kv_reuse_layers",
    "use_cla",
    "num_loops",
    "loop_num",
    "v_head_dim",
    # Another spelling of the KV heads, or another way to count them.
    "num_kv_heads",
    "n_head_kv",
    "multi_query",
    "multi_query_group_num",
    "num_query_groups",
    "kv_channels",
    # Cross attention keeps the encoder's keys and values too.
    "is_encoder_decoder",
)


def unlisted(fields: Fields) -> LayerMap:
    """The geometry by the standard fields alone.

    layer_types decide; without them sliding_window with its pattern, then sliding_window or
    attention_chunk_size for all layers, then all flat. Raises `UnknownLayerTypeError` for fields
    that hint at another kind of memory.
    """
    kinds = listed_kinds(fields) or _kinds_by_window(fields)
    _refuse_unknown_memory(fields, kinds)
    shared = fields.optional_integer("num_kv_shared_layers", 0) or 0
    return stack_kinds(fields, kinds, with_global(fields, kinds), shared)


def _kinds_by_window(fields: Fields) -> tuple[MemoryKind, ...]:
    count = fields.layer_count
    unused = fields.raw("use_sliding_window") is not None and not fields.flag("use_sliding_window")
    if not unused:
        if fields.raw("sliding_window_pattern") is not None:
            return by_pattern(fields)
        if fields.optional_integer("sliding_window") is not None:
            return all_of("ring", count)
    if fields.optional_integer("attention_chunk_size") is not None:
        return all_of("chunk", count)
    return all_of("flat", count)


def _refuse_unknown_memory(fields: Fields, kinds: Sequence[MemoryKind]) -> None:
    set_fields = sorted(
        name for name, value in fields.values.items() if isinstance(name, str) and value
    )
    found = [name for name in set_fields if name in UNKNOWN_FIELDS]
    if "recurrent" not in kinds:
        found += [
            name for name in set_fields if name in STATE_FIELDS or name.startswith(STATE_PREFIXES)
        ]
    if found:
        raise UnknownLayerTypeError(
            f"{fields.family} is not a model_type with a known caching rule, and its config field "
            f"{found[0]!r} ({fields.values[found[0]]!r}) says that it caches something that the "
            "standard fields do not describe. Trace the loaded model instead "
            "(mlx_kvcache.integrations.tracing), or add a rule (docs/model_families.md)"
        )
