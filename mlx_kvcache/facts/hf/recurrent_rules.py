"""Rules, and orders of layer kinds, of families with recurrent layers.

Each docstring names its family.
"""

from __future__ import annotations

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.hf import row_shapes
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_stack import LayerStack, stack_kinds
from mlx_kvcache.facts.hf.layer_types import (
    HYBRID,
    MemoryKind,
    all_of,
    every,
    kinds_of,
    listed_kinds,
    required_layer_types,
    resolved_kinds,
)
from mlx_kvcache.facts.hf.row_shapes import of_heads
from mlx_kvcache.facts.layers import LayerMap


def bailing_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """bailing: the last layer of a group is full, and so is what is left over after the groups."""
    count, size = fields.layer_count, fields.integer("layer_group_size")
    whole = count // size * size
    own = every(size, whole, "recurrent") + all_of("flat", count - whole)
    return resolved_kinds(fields, "layer_group_size", own)


def kimi_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """kimi: linear_attn_config.kda_layers lists the linear layers, counted from 1."""
    listed = listed_kinds(fields)
    if listed is not None and not fields.given("linear_attn_config"):
        return listed
    linear = set(fields.section("linear_attn_config").integers("kda_layers", 1))
    numbers = range(1, fields.layer_count + 1)
    own = tuple(_full_or_recurrent(number not in linear) for number in numbers)
    return resolved_kinds(fields, "linear_attn_config", own)


def lfm2_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """lfm2: full_attn_idxs lists the attention layers; without it, layer_types do."""
    if not fields.given("full_attn_idxs"):
        return required_layer_types(HYBRID)(fields)
    full = set(fields.integers("full_attn_idxs"))
    own = tuple(_full_or_recurrent(index in full) for index in range(fields.layer_count))
    return resolved_kinds(fields, "full_attn_idxs", own)


def _full_or_recurrent(is_full: bool) -> MemoryKind:
    return "flat" if is_full else "recurrent"


def jamba_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """jamba: layers_block_type, else attention at attn_layer_offset of each attn_layer_period."""
    count = fields.layer_count
    blocks = fields.words("layers_block_type", count)
    if blocks is not None:
        return kinds_of(fields, blocks, HYBRID)
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", 0)
    if offset >= period:
        raise fields.error("attn_layer_offset", offset, f"less than the period ({period})")
    return every(period, count, "recurrent", offset)


def plamo2_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """plamo2: one attention layer in each mamba_step; with few layers only the last."""
    count = fields.layer_count
    if not fields.flag("mamba_enabled"):
        return all_of("flat", count)
    step = fields.integer("mamba_step", 2)
    if count <= step // 2:
        return (*all_of("recurrent", count - 1), "flat")
    return every(step, count, "recurrent", step // 2)


#: nemotron_h writes a block as a letter or as a word.
NEMOTRON_BLOCKS: dict[str, MemoryKind] = {
    "*": "flat",
    "full_attention": "flat",
    "attention": "flat",
    "M": "recurrent",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "E": "none",
    "moe": "none",
    "-": "none",
    "mlp": "none",
}


def nemotron_h_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """nemotron_h: a letter or word for each block; the list itself says how many there are."""
    blocks = fields.raw("hybrid_override_pattern")
    if isinstance(blocks, str):
        blocks = tuple(blocks)
    elif blocks is not None:
        blocks = fields.words("hybrid_override_pattern")
    blocks = blocks or fields.words("layers_block_type") or fields.words("layer_types")
    if not blocks:
        raise fields.error("hybrid_override_pattern", None, "a list or word of block types")
    for index, block in enumerate(blocks):
        if block not in NEMOTRON_BLOCKS:
            raise UnknownLayerTypeError(
                f"block {index} of {fields.family} has the type {block!r}, whose caching rule is "
                f"not known; known are {', '.join(NEMOTRON_BLOCKS)}"
            )
    return tuple(NEMOTRON_BLOCKS[block] for block in blocks)


def nemotron_nas(fields: Fields) -> LayerMap:
    """nemotron-nas: a config for each block, which may have no attention at all."""
    count, heads = fields.layer_count, row_shapes.query_heads(fields)
    blocks = fields.raw("block_configs")
    if not isinstance(blocks, (list, tuple)) or len(blocks) != count:
        raise fields.error("block_configs", blocks, f"a list of {count} objects")
    head_dim = row_shapes.derived_head_dim(fields)
    stack = LayerStack()
    for index, block in enumerate(blocks):
        attention = Fields({"block": block}, f"{fields.family}.block_configs[{index}]")
        attention = attention.section("block").section("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            stack.skip()
        else:
            group = attention.integer("n_heads_in_group")
            if heads % group:
                raise attention.error("n_heads_in_group", group, f"a divisor of {heads} heads")
            stack.attend(of_heads(heads // group, head_dim).flat())
    return stack.build()


def recurrent_gemma(fields: Fields) -> LayerMap:
    """recurrent_gemma: block_types repeat; attention has one KV head and a window."""
    blocks = fields.words("block_types") or fields.words("_block_types")
    if not blocks:
        raise fields.error("block_types", None, "a list of 'recurrent' and 'attention'")
    head_dim, window = row_shapes.derived_head_dim(fields), fields.integer("attention_window_size")
    types = [blocks[index % len(blocks)] for index in range(fields.layer_count)]
    kinds = tuple("ring" if kind == "flat" else kind for kind in kinds_of(fields, types, HYBRID))
    return stack_kinds(fields, kinds, of_heads(1, head_dim), window=window)


def baichuan_m1(fields: Fields) -> LayerMap:
    """baichuan_m1: a convolution beside each attention; listed layers slide, with own heads."""
    sliding = set(fields.integers("sliding_window_layers"))
    hidden, full = fields.integer("hidden_size"), row_shapes.derived(fields)
    heads = fields.optional_integer("num_swa_attention_heads", 0) or row_shapes.query_heads(fields)
    swa_heads = fields.optional_integer("num_swa_key_value_heads", 0) or full.kv_heads
    swa = of_heads(swa_heads, hidden // heads)
    stack = LayerStack()
    for index in range(fields.layer_count):
        layer = swa.ring(fields.integer("sliding_window")) if index in sliding else full.flat()
        stack.attend(layer, recurrent=True)
    return stack.build()


def falcon_h1(fields: Fields) -> LayerMap:
    """falcon_h1: every layer has a state space beside its attention."""
    shape = row_shapes.given(fields)
    stack = LayerStack()
    for _ in range(fields.layer_count):
        stack.attend(shape.flat(), recurrent=True)
    return stack.build()
