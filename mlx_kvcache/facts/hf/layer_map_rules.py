"""Rules of families whose layers own several caches each, or read those of other layers.

Each docstring names its family.
"""

from __future__ import annotations

from dataclasses import replace

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.hf import row_shapes
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_stack import LayerStack, Rule, stack_kinds
from mlx_kvcache.facts.hf.layer_types import (
    SLIDING,
    all_of,
    every,
    listed_kinds,
    required_layer_types,
)
from mlx_kvcache.facts.hf.row_shapes import RowShape, ShapeOf, of_heads
from mlx_kvcache.facts.layers import LayerGeometry, LayerMap, ModelLayer

#: mlx-lm's gemma4 default for an absent num_kv_shared_layers.
GEMMA4_SHARED_LAYERS = 20


def gemma3n(fields: Fields) -> LayerMap:
    """gemma3n: the trailing num_kv_shared_layers read the last owner of their own type."""
    kinds = required_layer_types(SLIDING)(fields)
    if "num_kv_shared_layers" not in fields.values:
        # transformers takes 15 then, and mlx-lm builds no model.
        raise fields.error("num_kv_shared_layers", None, "an integer >= 0, or null")
    shared = fields.optional_integer("num_kv_shared_layers", 0) or 0
    return stack_kinds(fields, kinds, row_shapes.given(fields), shared)


def gemma4(fields: Fields) -> LayerMap:
    """gemma4_text: as gemma3n, and full layers have a head dim and KV heads of their own."""
    kinds = listed_kinds(fields, SLIDING)
    if kinds is None:
        kinds = every(fields.integer("sliding_window_pattern"), fields.layer_count, "ring")
    shared = fields.optional_integer("num_kv_shared_layers", 0) or 0
    if "num_kv_shared_layers" not in fields.values and len(kinds) > GEMMA4_SHARED_LAYERS:
        # mlx-lm reads an absent field so; with fewer layers it could not build the model.
        shared = GEMMA4_SHARED_LAYERS
    return stack_kinds(fields, kinds, row_shapes.with_global(fields, kinds), shared)


def afm7(fields: Fields) -> LayerMap:
    """afm7: the last num_kv_reuse_layers read the last cached layer."""
    count, shape = fields.layer_count, row_shapes.derived(fields)
    reuse = fields.integer("num_kv_reuse_layers", 0)
    if reuse >= count:
        raise fields.error("num_kv_reuse_layers", reuse, f"less than the layers ({count})")
    return stack_kinds(fields, all_of("flat", count), shape, reuse)


def several_caches(*shapes: ShapeOf, leading_state: int = 0) -> Rule:
    """Every layer has a flat cache of each of these shapes.

    `leading_state` entries come before the layers: the n-gram embedding of longcat_flash_ngram
    keeps the last tokens.
    """

    def rule(fields: Fields) -> LayerMap:
        layers = [shape(fields).flat() for shape in shapes]
        stack = LayerStack()
        for _ in range(leading_state):
            stack.recur()
        for _ in range(fields.layer_count):
            stack.attend(*layers)
        return stack.build()

    return rule


def indexer(fields: Fields) -> RowShape:
    """deepseek_v32: the indexer's keys, given as values too."""
    return of_heads(1, fields.integer("index_head_dim"))


#: The published config of minimax_m3_vl nests these fields, a re-saved one has them flat.
MINIMAX_M3_NESTED = {
    "sparse_block_size": "index_block_size",
    "sparse_index_dim": "index_head_dim",
    "sparse_attention_freq": "sparse_attention_freq",
}


def minimax_m3(fields: Fields) -> LayerMap:
    """minimax_m3_vl: sparse layers also cache the indexer's keys, without values."""
    if fields.raw("sparse_attention_config"):
        nested = fields.section("sparse_attention_config").values
        found = {flat: nested[name] for name, flat in MINIMAX_M3_NESTED.items() if name in nested}
        fields = replace(fields, values={**fields.values, **found})
    shape = row_shapes.given(fields)
    stack = LayerStack()
    for is_sparse in _sparse_layers(fields):
        if is_sparse:
            stack.attend(shape.flat(), RowShape(1, fields.integer("index_head_dim"), 0).flat())
        else:
            stack.attend(shape.flat())
    return stack.build()


def _sparse_layers(fields: Fields) -> list[bool]:
    count = fields.layer_count
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


def iquestloopcoder(fields: Fields) -> LayerMap:
    """iquestloopcoder: two passes over the layers: all the flat caches, then all the rings."""
    count, shape = fields.layer_count, row_shapes.given(fields)
    if fields.integer("loop_num") != 2:
        raise fields.error("loop_num", fields.raw("loop_num"), "2, the only one mlx-lm runs")
    ring = shape.ring(fields.integer("loop_window_size"))
    return _looped([shape.flat()] * count + [ring] * count, count)


def nanbeige(fields: Fields) -> LayerMap:
    """nanbeige: num_loops passes over the layers, each with caches of its own."""
    count, loops = fields.layer_count, fields.integer("num_loops")
    weights = fields.raw("loop_loss_weights")
    if weights:
        if not isinstance(weights, (list, tuple)):
            raise fields.error("loop_loss_weights", weights, "a list of numbers")
        loops = len(weights) + 1
    return _looped([row_shapes.either(fields).flat()] * (count * loops), count)


def _looped(layers: list[LayerGeometry], count: int) -> LayerMap:
    """A stack of `count` layers run several times: layer i reads caches i, i + count, ..."""
    reads = [tuple(range(index, len(layers), count)) for index in range(count)]
    return LayerMap(tuple(layers), tuple(ModelLayer(caches) for caches in reads))
