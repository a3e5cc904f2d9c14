"""Caching rules that several model families share, as functions of a config's fields.

A rule turns `Fields` into a `CacheGeometry`. What a family caches is what its mlx-lm model file
does, so each rule says which of mlx-lm's `make_cache` shapes it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_types import (
    Kind,
    Stack,
    all_of,
    every,
    listed_kinds,
    resolve_kinds,
    stack_kinds,
)
from mlx_kvcache.facts.hf.row_shapes import Row, RowOf, either_head_dim, kv_heads

Rule = Callable[[Fields], CacheGeometry]
PatternOf = Callable[[int], tuple[Kind, ...]]

ATTENTION: tuple[Kind, ...] = ("flat", "ring", "chunk")


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers")


def flat(row_of: RowOf) -> Rule:
    """Every layer keeps everything, whatever windows the config mentions."""

    def rule(fields: Fields) -> CacheGeometry:
        stack, count = Stack(), layer_count(fields)
        # mlx-lm does not look at the list here; one that speaks of states is another model's.
        listed_kinds(fields, count, ATTENTION)
        for _ in range(count):
            stack.attend(row_of(fields).flat())
        return stack.build()

    return rule


def by_layer_types(
    row_of: RowOf, default: PatternOf | None = None, allowed: Sequence[Kind] = ("flat", "ring")
) -> Rule:
    """layer_types decide, within the `allowed` kinds.

    `default` gives the kinds where the list is absent; without it they are all flat.
    """

    def rule(fields: Fields) -> CacheGeometry:
        count = layer_count(fields)
        kinds = listed_kinds(fields, count, allowed)
        if kinds is None:
            kinds = default(count) if default else all_of("flat", count)
        return stack_kinds(fields, kinds, [row_of(fields)] * count)

    return rule


def three_to_one(count: int) -> tuple[Kind, ...]:
    """Three sliding layers, then a full one."""
    return every(4, count, "ring")


def alternating(count: int) -> tuple[Kind, ...]:
    """A sliding layer, then a full one."""
    return every(2, count, "ring")


def every_nth(row_of: RowOf, period_field: str, other: Kind) -> Rule:
    """Layers n, 2n, ... (counted from 1) are full, the others sliding or recurrent."""

    def rule(fields: Fields) -> CacheGeometry:
        count, period = layer_count(fields), fields.integer(period_field)
        kinds = resolve_kinds(fields, period_field, every(period, count, other), count)
        return stack_kinds(fields, kinds, [row_of(fields)] * count)

    return rule


def grouped(row_of: RowOf) -> Rule:
    """bailing: the last layer of a group is full, and so is what is left over after the groups."""

    def rule(fields: Fields) -> CacheGeometry:
        count, size = layer_count(fields), fields.integer("layer_group_size")
        whole = count // size * size
        kinds = every(size, whole, "recurrent") + all_of("flat", count - whole)
        kinds = resolve_kinds(fields, "layer_group_size", kinds, count)
        return stack_kinds(fields, kinds, [row_of(fields)] * count)

    return rule


def kda_layers(row_of: RowOf) -> Rule:
    """kimi: linear_attn_config.kda_layers lists the linear layers, counted from 1."""

    def rule(fields: Fields) -> CacheGeometry:
        count = layer_count(fields)
        own = listed_kinds(fields, count)
        if own is None or fields.given("linear_attn_config"):
            linear = set(fields.section("linear_attn_config").integers("kda_layers", 1))
            kinds: tuple[Kind, ...] = tuple(
                "recurrent" if index + 1 in linear else "flat" for index in range(count)
            )
            own = resolve_kinds(fields, "linear_attn_config", kinds, count)
        return stack_kinds(fields, own, [row_of(fields)] * count)

    return rule


def full_indices(row_of: RowOf) -> Rule:
    """lfm2: full_attn_idxs lists the attention layers; without it, layer_types do."""

    def rule(fields: Fields) -> CacheGeometry:
        count = layer_count(fields)
        if not fields.given("full_attn_idxs"):
            if not fields.given("layer_types"):
                raise fields.error("layer_types", None, "a list of layer types")
            return by_layer_types(row_of, allowed=("flat", "recurrent"))(fields)
        full = set(fields.integers("full_attn_idxs"))
        kinds: tuple[Kind, ...] = tuple(
            "flat" if index in full else "recurrent" for index in range(count)
        )
        kinds = resolve_kinds(fields, "full_attn_idxs", kinds, count)
        return stack_kinds(fields, kinds, [row_of(fields)] * count)

    return rule


def beside_recurrent(row_of: RowOf) -> Rule:
    """falcon_h1: every layer has a state space beside its attention."""

    def rule(fields: Fields) -> CacheGeometry:
        stack = Stack()
        for _ in range(layer_count(fields)):
            stack.attend(row_of(fields).flat(), recurrent=True)
        return stack.build()

    return rule


def with_indexer(row_of: RowOf) -> Rule:
    """deepseek_v32: a second cache a layer holds the indexer's keys, given as values too."""

    def rule(fields: Fields) -> CacheGeometry:
        index_dim = fields.integer("index_head_dim")
        stack = Stack()
        for _ in range(layer_count(fields)):
            stack.attend(row_of(fields).flat(), Row(1, index_dim, index_dim).flat())
        return stack.build()

    return rule


def twice(row_of: RowOf, leading_state: int = 0) -> Rule:
    """longcat: two attentions a layer, each with its cache.

    `leading_state` entries come before the layers: the n-gram embedding keeps the last tokens.
    """

    def rule(fields: Fields) -> CacheGeometry:
        stack = Stack()
        for _ in range(leading_state):
            stack.recur()
        for _ in range(layer_count(fields)):
            stack.attend(row_of(fields).flat(), row_of(fields).flat())
        return stack.build()

    return rule


def purely_recurrent(fields: Fields) -> CacheGeometry:
    """mamba, rwkv: refused, since there are no keys and values to keep."""
    raise GeometryError(
        f"{fields.family} is purely recurrent: it keeps a state of fixed size and no keys or "
        "values, so this cache has nothing to hold; use mlx-lm's own cache for it"
    )


def shared_kv(fields: Fields) -> CacheGeometry:
    """gemma3n: the trailing num_kv_shared_layers read the last owner of their own type."""
    count = layer_count(fields)
    kinds = listed_kinds(fields, count, ("flat", "ring"))
    if kinds is None:
        raise fields.error("layer_types", None, "a list of layer types")
    head_dim = fields.integer("head_dim")
    rows = [Row(kv_heads(fields), head_dim, head_dim)] * count
    return stack_kinds(fields, kinds, rows, fields.optional_integer("num_kv_shared_layers", 0) or 0)


def global_rows(fields: Fields, kinds: tuple[Kind, ...]) -> list[Row]:
    """gemma4: full layers may have head_dim and KV heads of their own.

    global_head_dim always applies to them, num_global_key_value_heads only with
    attention_k_eq_v. A config object of transformers gives the same facts as per_layer_config.
    """
    local_dim = either_head_dim(fields)
    local = Row(kv_heads(fields), local_dim, local_dim)
    full_dim = fields.optional_integer("global_head_dim") or local_dim
    heads = local.kv_heads
    if fields.flag("attention_k_eq_v"):
        heads = fields.optional_integer("num_global_key_value_heads") or heads
    full = Row(heads, full_dim, full_dim)
    rows = [full if kind == "flat" else local for kind in kinds]
    if not fields.given("per_layer_config"):
        return rows
    overrides = fields.section("per_layer_config")
    return [_overridden(overrides, index, row) for index, row in enumerate(rows)]


def _overridden(overrides: Fields, index: int, row: Row) -> Row:
    # JSON has string keys, the config object itself integers.
    by_index: Mapping[Any, Any] = overrides.values
    values = by_index.get(str(index), by_index.get(index))
    if values is None:
        return row
    if not isinstance(values, Mapping):
        raise overrides.error(str(index), values, "an object with fields of its own")
    own = Fields(values, f"{overrides.family}[{index}]")
    heads = own.optional_integer("num_key_value_heads") or row.kv_heads
    head_dim = own.optional_integer("head_dim")
    return Row(heads, head_dim or row.key_dim, head_dim or row.value_dim)
