"""Rules, and orders of layer kinds, of single families that only attend: a cache for each layer.

Each docstring names its family.
"""

from __future__ import annotations

from mlx_kvcache.facts.hf import row_shapes
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_stack import stack_kinds
from mlx_kvcache.facts.hf.layer_types import (
    SLIDING,
    MemoryKind,
    all_of,
    by_pattern,
    every,
    kinds_of,
    listed_kinds,
    resolved_kinds,
)
from mlx_kvcache.facts.hf.row_shapes import RowShape, of_heads
from mlx_kvcache.facts.layers import LayerMap


def gpt_oss_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """gpt_oss: layer_types, or alternating; the default list covers an even number of layers."""
    count = fields.layer_count
    kinds = listed_kinds(fields, SLIDING)
    if kinds is None and count % 2:
        raise fields.error("layer_types", None, f"a list of {count} layer types")
    return kinds or every(2, count, "ring")


def llama4_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """llama4: chunked attention on three layers of four."""
    kinds = every(4, fields.layer_count, "chunk")
    if listed_kinds(fields, ("flat", "chunk")) not in (None, kinds):
        raise fields.error("layer_types", fields.raw("layer_types"), "full on each fourth layer")
    return kinds


def exaone4_kinds(fields: Fields) -> tuple[MemoryKind, ...]:
    """exaone4: a string pattern, L for sliding and G for full; null for all full."""
    if fields.raw("sliding_window_pattern") is None:
        return listed_kinds(fields, SLIDING) or all_of("flat", fields.layer_count)
    return resolved_kinds(fields, "sliding_window_pattern", by_pattern(fields))


def mimo_v2_flash(fields: Fields) -> LayerMap:
    """mimo_v2_flash: hybrid_layer_pattern; 1 slides, with rows of another shape."""
    count = fields.layer_count
    full = RowShape(
        row_shapes.kv_heads(fields), fields.integer("head_dim"), fields.integer("v_head_dim")
    )
    sliding = RowShape(
        fields.integer("swa_num_key_value_heads"),
        fields.integer("swa_head_dim"),
        fields.integer("swa_v_head_dim"),
    )
    pattern = fields.integers("hybrid_layer_pattern")
    if len(pattern) != count or set(pattern) - {0, 1}:
        raise fields.error("hybrid_layer_pattern", pattern, f"{count} times 0 (full) or 1 (slides)")
    window = fields.integer("sliding_window_size") if 1 in pattern else 0
    kinds: tuple[MemoryKind, ...] = tuple("ring" if slides else "flat" for slides in pattern)
    shapes = [sliding if slides else full for slides in pattern]
    return stack_kinds(fields, kinds, shapes, window=window)


def step3p5(fields: Fields) -> LayerMap:
    """step3p5: layer_types may go on past the layers; without them every other layer slides."""
    count = fields.layer_count
    types = fields.words("layer_types")
    if types and len(types) < count:
        raise fields.error("layer_types", types, f"at least {count} entries")
    kinds = kinds_of(fields, types[:count], SLIDING) if types else every(2, count, "ring")
    full = sliding = row_shapes.given(fields)
    if fields.raw("attention_other_setting"):
        other = fields.section("attention_other_setting").integer("num_attention_groups")
        sliding = of_heads(other, full.key_dim)
    return stack_kinds(fields, kinds, [sliding if kind == "ring" else full for kind in kinds])


def plamo(fields: Fields) -> LayerMap:
    """plamo: n_shared_head query heads share a KV head."""
    heads, shared = row_shapes.query_heads(fields), fields.integer("n_shared_head")
    shape = of_heads(-(-heads // shared), row_shapes.derived_head_dim(fields))
    return stack_kinds(fields, all_of("flat", fields.layer_count), shape)


def plamo3(fields: Fields) -> LayerMap:
    """plamo3: each sliding_window_pattern-th layer is full, the others see window_size rows back.

    That is one position more than a window counts, which includes the query itself. mlx-lm masks
    accordingly, but its caches keep one row too few.
    """
    shape = row_shapes.given(fields)
    window = fields.optional_integer("sliding_window") or fields.integer("window_size")
    own = every(fields.integer("sliding_window_pattern"), fields.layer_count, "ring")
    kinds = resolved_kinds(fields, "sliding_window_pattern", own)
    return stack_kinds(fields, kinds, shape, window=window + 1)


def openelm(fields: Fields) -> LayerMap:
    """openelm: a number of KV heads for each layer."""
    count, head_dim = fields.layer_count, fields.integer("head_dim")
    heads = fields.integers("num_kv_heads", 1)
    if len(heads) != count:
        raise fields.error("num_kv_heads", heads, f"a list of {count} integers")
    return stack_kinds(fields, all_of("flat", count), [of_heads(each, head_dim) for each in heads])
