"""Caching rules of single families that mix attention with recurrent layers."""

from __future__ import annotations

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_map_rules import layer_count
from mlx_kvcache.facts.hf.layer_types import (
    Kind,
    Stack,
    all_of,
    every,
    kinds_of,
    listed_kinds,
    stack_kinds,
)
from mlx_kvcache.facts.hf.row_shapes import (
    Row,
    derived_head_dim,
    derived_row,
    either_row,
    given_row,
)

MIXED: tuple[Kind, ...] = ("flat", "recurrent")


def granitemoehybrid(fields: Fields) -> CacheGeometry:
    """granitemoehybrid: layer_types, which must be given, name attention and mamba layers."""
    count = layer_count(fields)
    kinds = listed_kinds(fields, count, MIXED)
    if kinds is None:
        raise fields.error("layer_types", None, "a list of layer types")
    return stack_kinds(fields, kinds, [derived_row(fields)] * count)


def jamba(fields: Fields) -> CacheGeometry:
    """jamba: layers_block_type, else attention at attn_layer_offset of each attn_layer_period."""
    count = layer_count(fields)
    blocks = fields.words("layers_block_type", count)
    if blocks is not None:
        kinds = kinds_of(fields, blocks, MIXED)
    else:
        period, offset = (
            fields.integer("attn_layer_period"),
            fields.integer("attn_layer_offset", 0),
        )
        if offset >= period:
            raise fields.error("attn_layer_offset", offset, f"less than the period ({period})")
        kinds = every(period, count, "recurrent", offset)
    return stack_kinds(fields, kinds, [derived_row(fields)] * count)


#: nemotron_h writes a block as a letter or as a word; None remembers nothing.
NEMOTRON_BLOCKS: dict[str, Kind | None] = {
    "*": "flat",
    "full_attention": "flat",
    "attention": "flat",
    "M": "recurrent",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "E": None,
    "moe": None,
    "-": None,
    "mlp": None,
}


def nemotron_h(fields: Fields) -> CacheGeometry:
    """nemotron_h: a letter or word for each block; the list itself says how many there are."""
    blocks = fields.raw("hybrid_override_pattern")
    if isinstance(blocks, str):
        blocks = tuple(blocks)
    elif blocks is not None:
        blocks = fields.words("hybrid_override_pattern")
    blocks = blocks or fields.words("layers_block_type") or fields.words("layer_types")
    if not blocks:
        raise fields.error("hybrid_override_pattern", None, "a list or word of block types")
    row = either_row(fields)
    stack = Stack()
    for index, block in enumerate(blocks):
        if block not in NEMOTRON_BLOCKS:
            raise UnknownLayerTypeError(
                f"block {index} of {fields.family} has the type {block!r}, whose caching rule is "
                f"not known; known are {', '.join(NEMOTRON_BLOCKS)}"
            )
        kind = NEMOTRON_BLOCKS[block]
        if kind == "flat":
            stack.attend(row.flat())
        elif kind == "recurrent":
            stack.recur()
        else:
            stack.skip()
    return stack.build()


def nemotron_nas(fields: Fields) -> CacheGeometry:
    """nemotron-nas: a config for each block, which may have no attention at all."""
    count, heads = layer_count(fields), fields.integer("num_attention_heads")
    blocks = fields.raw("block_configs")
    if not isinstance(blocks, (list, tuple)) or len(blocks) != count:
        raise fields.error("block_configs", blocks, f"a list of {count} objects")
    head_dim = derived_head_dim(fields)
    stack = Stack()
    for index, block in enumerate(blocks):
        attention = Fields({"block": block}, f"{fields.family}.block_configs[{index}]")
        attention = attention.section("block").section("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            stack.skip()
        else:
            group = attention.integer("n_heads_in_group")
            if heads % group:
                raise attention.error("n_heads_in_group", group, f"a divisor of {heads} heads")
            stack.attend(Row(heads // group, head_dim, head_dim).flat())
    return stack.build()


def plamo2(fields: Fields) -> CacheGeometry:
    """plamo2: one attention layer in each mamba_step; with few layers only the last."""
    count, row = layer_count(fields), given_row(fields)
    if not fields.flag("mamba_enabled"):
        return stack_kinds(fields, all_of("flat", count), [row] * count)
    step = fields.integer("mamba_step", 2)
    if count <= step // 2:
        kinds: tuple[Kind, ...] = (*all_of("recurrent", count - 1), "flat")
    else:
        kinds = every(step, count, "recurrent", step // 2)
    return stack_kinds(fields, kinds, [row] * count)


def recurrent_gemma(fields: Fields) -> CacheGeometry:
    """recurrent_gemma: block_types repeat; attention has one KV head and a window."""
    count = layer_count(fields)
    blocks = fields.words("block_types") or fields.words("_block_types")
    if not blocks:
        raise fields.error("block_types", None, "a list of 'recurrent' and 'attention'")
    head_dim, window = derived_head_dim(fields), fields.integer("attention_window_size")
    kinds = kinds_of(fields, [blocks[index % len(blocks)] for index in range(count)], MIXED)
    stack = Stack()
    for kind in kinds:
        if kind == "recurrent":
            stack.recur()
        else:
            stack.attend(Row(1, head_dim, head_dim).ring(window))
    return stack.build()


def baichuan_m1(fields: Fields) -> CacheGeometry:
    """baichuan_m1: a convolution beside each attention; listed layers slide, with own heads."""
    sliding = set(fields.integers("sliding_window_layers"))
    hidden, full = fields.integer("hidden_size"), derived_row(fields)
    heads = fields.optional_integer("num_swa_attention_heads", 0) or fields.integer(
        "num_attention_heads"
    )
    swa_heads = fields.optional_integer("num_swa_key_value_heads", 0) or full.kv_heads
    swa = Row(swa_heads, hidden // heads, hidden // heads)
    stack = Stack()
    for index in range(layer_count(fields)):
        layer = swa.ring(fields.integer("sliding_window")) if index in sliding else full.flat()
        stack.attend(layer, recurrent=True)
    return stack.build()
