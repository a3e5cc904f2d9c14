"""Caching rules of single attention-only families; each docstring names its family."""

from __future__ import annotations

from dataclasses import replace

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, ModelLayer
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_map_rules import global_rows, layer_count
from mlx_kvcache.facts.hf.layer_types import (
    Kind,
    Stack,
    all_of,
    every,
    kinds_of,
    listed_kinds,
    resolve_kinds,
    stack_kinds,
)
from mlx_kvcache.facts.hf.row_shapes import (
    Row,
    derived_head_dim,
    derived_row,
    either_row,
    given_row,
    kv_heads,
)

#: mlx-lm's gemma4 default for an absent num_kv_shared_layers.
GEMMA4_SHARED_LAYERS = 20


def gemma4(fields: Fields) -> CacheGeometry:
    """gemma4_text: shared layers, and full layers with a head dim and KV heads of their own."""
    count = layer_count(fields)
    kinds = listed_kinds(fields, count, ("flat", "ring"))
    if kinds is None:
        kinds = every(fields.integer("sliding_window_pattern"), count, "ring")
    shared = fields.optional_integer("num_kv_shared_layers", 0) or 0
    if "num_kv_shared_layers" not in fields.values and count > GEMMA4_SHARED_LAYERS:
        # mlx-lm reads an absent field so; with fewer layers it could not build the model.
        shared = GEMMA4_SHARED_LAYERS
    return stack_kinds(fields, kinds, global_rows(fields, kinds), shared)


def gpt_oss(fields: Fields) -> CacheGeometry:
    """gpt_oss: layer_types, or alternating; the default list covers an even number of layers."""
    count = layer_count(fields)
    kinds = listed_kinds(fields, count, ("flat", "ring"))
    if kinds is None:
        if count % 2:
            raise fields.error("layer_types", None, f"a list of {count} layer types")
        kinds = every(2, count, "ring")
    return stack_kinds(fields, kinds, [given_row(fields)] * count)


def llama4(fields: Fields) -> CacheGeometry:
    """llama4: chunked attention on three layers of four."""
    count = layer_count(fields)
    kinds = every(4, count, "chunk")
    listed = listed_kinds(fields, count, ("flat", "chunk"))
    if listed not in (None, kinds):
        raise fields.error("layer_types", fields.raw("layer_types"), "full on each fourth layer")
    return stack_kinds(fields, kinds, [either_row(fields)] * count)


def exaone4(fields: Fields) -> CacheGeometry:
    """exaone4: a string pattern, L for sliding and G for full; null for all full."""
    count = layer_count(fields)
    pattern = fields.raw("sliding_window_pattern")
    if pattern is None:
        kinds = listed_kinds(fields, count, ("flat", "ring")) or all_of("flat", count)
    else:
        own = pattern_kinds(fields, count)
        kinds = resolve_kinds(fields, "sliding_window_pattern", own, count)
    return stack_kinds(fields, kinds, [either_row(fields)] * count)


def pattern_kinds(fields: Fields, count: int) -> tuple[Kind, ...]:
    """The kinds by sliding_window_pattern: a period whose last layer is full, or a word of L, G."""
    pattern = fields.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error("sliding_window_pattern", pattern, "a word of the letters L and G")
        return tuple(
            "ring" if pattern[index % len(pattern)] == "L" else "flat" for index in range(count)
        )
    return every(fields.integer("sliding_window_pattern"), count, "ring")


def mimo_v2_flash(fields: Fields) -> CacheGeometry:
    """mimo_v2_flash: hybrid_layer_pattern; 1 slides, with rows of another shape."""
    count = layer_count(fields)
    full = Row(kv_heads(fields), fields.integer("head_dim"), fields.integer("v_head_dim"))
    sliding = Row(
        fields.integer("swa_num_key_value_heads"),
        fields.integer("swa_head_dim"),
        fields.integer("swa_v_head_dim"),
    )
    pattern = fields.integers("hybrid_layer_pattern")
    if len(pattern) != count or set(pattern) - {0, 1}:
        raise fields.error("hybrid_layer_pattern", pattern, f"{count} times 0 (full) or 1 (slides)")
    window = fields.integer("sliding_window_size") if 1 in pattern else 0
    stack = Stack()
    for slides in pattern:
        stack.attend(sliding.ring(window) if slides else full.flat())
    return stack.build()


def step3p5(fields: Fields) -> CacheGeometry:
    """step3p5: layer_types may go on past the layers; without them every other layer slides."""
    count = layer_count(fields)
    types = fields.words("layer_types")
    if types:
        if len(types) < count:
            raise fields.error("layer_types", types, f"at least {count} entries")
        kinds = kinds_of(fields, types[:count], ("flat", "ring"))
    else:
        kinds = every(2, count, "ring")
    full = given_row(fields)
    sliding = full
    if fields.raw("attention_other_setting"):
        other = fields.section("attention_other_setting").integer("num_attention_groups")
        sliding = Row(other, full.key_dim, full.value_dim)
    rows = [sliding if kind == "ring" else full for kind in kinds]
    return stack_kinds(fields, kinds, rows)


#: The published config of minimax_m3_vl nests these fields, a re-saved one has them flat.
MINIMAX_M3_NESTED = {
    "sparse_block_size": "index_block_size",
    "sparse_index_dim": "index_head_dim",
    "sparse_attention_freq": "sparse_attention_freq",
}


def minimax_m3(fields: Fields) -> CacheGeometry:
    """minimax_m3_vl: sparse layers also cache the indexer's keys, without values."""
    count = layer_count(fields)
    if fields.raw("sparse_attention_config"):
        nested = fields.section("sparse_attention_config").values
        found = {flat: nested[name] for name, flat in MINIMAX_M3_NESTED.items() if name in nested}
        fields = replace(fields, values={**fields.values, **found})
    row = given_row(fields)
    stack = Stack()
    for is_sparse in _sparse_layers(fields, count):
        if is_sparse:
            stack.attend(row.flat(), Row(1, fields.integer("index_head_dim"), 0).flat())
        else:
            stack.attend(row.flat())
    return stack.build()


def _sparse_layers(fields: Fields, count: int) -> list[bool]:
    types = fields.words("layer_types", count)
    for name in types or ():
        if name not in ("full_attention", "minimax_m3_sparse"):
            raise UnknownLayerTypeError(
                f"layer type {name!r} of {fields.family} has no known caching rule; known are "
                "full_attention and minimax_m3_sparse"
            )
    if fields.optional_integer("index_block_size") is None:
        return [False] * count
    if types is not None:
        return [name != "full_attention" for name in types]
    if not fields.given("sparse_attention_freq"):
        return [True] * count
    listed = fields.integers("sparse_attention_freq")
    if len(listed) != count:
        raise fields.error("sparse_attention_freq", listed, f"a list of {count} integers")
    return [bool(item) for item in listed]


def plamo(fields: Fields) -> CacheGeometry:
    """plamo: n_shared_head query heads share a KV head."""
    heads, shared = fields.integer("num_attention_heads"), fields.integer("n_shared_head")
    head_dim = derived_head_dim(fields)
    stack = Stack()
    for _ in range(layer_count(fields)):
        stack.attend(Row(-(-heads // shared), head_dim, head_dim).flat())
    return stack.build()


def plamo3(fields: Fields) -> CacheGeometry:
    """plamo3: each sliding_window_pattern-th layer is full, the others see window_size rows back.

    That is one position more than a window counts, which includes the query itself. mlx-lm masks
    accordingly, but its caches keep one row too few.
    """
    count, row = layer_count(fields), given_row(fields)
    window = fields.optional_integer("sliding_window") or fields.integer("window_size")
    own = every(fields.integer("sliding_window_pattern"), count, "ring")
    stack = Stack()
    for kind in resolve_kinds(fields, "sliding_window_pattern", own, count):
        stack.attend(row.ring(window + 1) if kind == "ring" else row.flat())
    return stack.build()


def iquestloopcoder(fields: Fields) -> CacheGeometry:
    """iquestloopcoder: two passes over the layers: all the flat caches, then all the rings."""
    count, row = layer_count(fields), given_row(fields)
    if fields.integer("loop_num") != 2:
        raise fields.error("loop_num", fields.raw("loop_num"), "2, the only one mlx-lm runs")
    layers = [row.flat()] * count + [row.ring(fields.integer("loop_window_size"))] * count
    return looped(layers, count)


def nanbeige(fields: Fields) -> CacheGeometry:
    """nanbeige: num_loops passes over the layers, each with caches of its own."""
    count, loops = layer_count(fields), fields.integer("num_loops")
    weights = fields.raw("loop_loss_weights")
    if weights:
        if not isinstance(weights, (list, tuple)):
            raise fields.error("loop_loss_weights", weights, "a list of numbers")
        loops = len(weights) + 1
    return looped([either_row(fields).flat()] * (count * loops), count)


def looped(layers: list[LayerGeometry], count: int) -> CacheGeometry:
    """A stack of `count` layers run several times: layer i reads caches i, i + count, ..."""
    reads = [tuple(range(index, len(layers), count)) for index in range(count)]
    return CacheGeometry(tuple(layers), tuple(ModelLayer(caches) for caches in reads))


def afm7(fields: Fields) -> CacheGeometry:
    """afm7: the last num_kv_reuse_layers read the last cached layer."""
    count, row = layer_count(fields), derived_row(fields)
    reuse = fields.integer("num_kv_reuse_layers", 0)
    if reuse >= count:
        raise fields.error("num_kv_reuse_layers", reuse, f"less than the layers ({count})")
    return stack_kinds(fields, all_of("flat", count), [row] * count, reuse)


def openelm(fields: Fields) -> CacheGeometry:
    """openelm: a number of KV heads for each layer."""
    count, head_dim = layer_count(fields), fields.integer("head_dim")
    heads = fields.integers("num_kv_heads", 1)
    if len(heads) != count:
        raise fields.error("num_kv_heads", heads, f"a list of {count} integers")
    stack = Stack()
    for layer_heads in heads:
        stack.attend(Row(layer_heads, head_dim, head_dim).flat())
    return stack.build()
