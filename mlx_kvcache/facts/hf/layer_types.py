"""The pieces that every config rule is made of: rows, layer kinds, and the stack of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mlx_kvcache.errors import GeometryError, UnknownLayerTypeError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, ModelLayer
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.row_shapes import Row

Kind = Literal["flat", "ring", "chunk", "recurrent"]

#: Layer types as configs spell them, old and new, and what a layer of that type keeps.
KINDS: Mapping[str, Kind] = {
    "full_attention": "flat",
    "attention": "flat",
    "sliding_attention": "ring",
    "chunked_attention": "chunk",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "conv_mixer": "recurrent",
    "recurrent": "recurrent",
}


@dataclass
class Stack:
    """Builds a geometry layer by layer, bottom up."""

    layers: list[LayerGeometry] = field(default_factory=list)
    model_layers: list[ModelLayer] = field(default_factory=list)

    def attend(self, *layers: LayerGeometry, recurrent: bool = False) -> None:
        """A model layer that owns these cache layers, in this order."""
        first = len(self.layers)
        self.layers.extend(layers)
        owned = tuple(range(first, len(self.layers)))
        self.model_layers.append(ModelLayer(owned, recurrent=recurrent))

    def recur(self) -> None:
        """A model layer that has only a state of its own."""
        self.model_layers.append(ModelLayer(recurrent=True))

    def skip(self) -> None:
        """A model layer that remembers nothing."""
        self.model_layers.append(ModelLayer())

    def share(self, owner: int) -> None:
        """A model layer that reads what the cache layer `owner` holds."""
        self.layers[owner] = replace(self.layers[owner], shared=True)
        self.model_layers.append(ModelLayer((owner,), shares=True))

    def build(self) -> CacheGeometry:
        return CacheGeometry(tuple(self.layers), tuple(self.model_layers))


ALL_KINDS: tuple[Kind, ...] = ("flat", "ring", "chunk", "recurrent")


def kinds_of(
    fields: Fields, types: Sequence[str], allowed: Sequence[Kind] = ALL_KINDS
) -> tuple[Kind, ...]:
    """The kind of each layer type.

    Raises `UnknownLayerTypeError` for a type without a rule, or of a kind that the family's model
    does not have.
    """
    known = [name for name, kind in KINDS.items() if kind in allowed]
    for index, name in enumerate(types):
        if name not in known:
            raise UnknownLayerTypeError(
                f"layer {index} of {fields.family} has the layer type {name!r}, whose caching rule "
                f"is not known; known are {', '.join(known)}. A wrong guess would lose rows: "
                "trace the loaded model instead (mlx_kvcache.integrations.tracing)"
            )
    return tuple(KINDS[name] for name in types)


def listed_kinds(
    fields: Fields, count: int, allowed: Sequence[Kind] = ALL_KINDS
) -> tuple[Kind, ...] | None:
    """The kinds that the config's own layer_types name, or None where it has no such list."""
    types = fields.words("layer_types", count)
    return None if types is None else kinds_of(fields, types, allowed)


def resolve_kinds(
    fields: Fields, own_field: str, own: tuple[Kind, ...], count: int
) -> tuple[Kind, ...]:
    """The kinds by the family's own field, or by layer_types where only that is given.

    Raises `GeometryError` when the config gives both and they contradict each other.
    """
    listed = listed_kinds(fields, count)
    if listed is None or listed == own:
        return own
    if fields.given(own_field):
        layer = next(index for index in range(count) if listed[index] != own[index])
        raise GeometryError(
            f"config fields {own_field!r} ({fields.raw(own_field)!r}) and 'layer_types' of "
            f"{fields.family} contradict each other at layer {layer}: {own[layer]} against "
            f"{listed[layer]}. Correct one of them in the model's config.json"
        )
    return listed


def every(period: int, count: int, other: Kind, offset: int = -1) -> tuple[Kind, ...]:
    """`count` kinds: flat where index % period is `offset` (the last of a period), else `other`."""
    offset %= period
    return tuple("flat" if index % period == offset else other for index in range(count))


def all_of(kind: Kind, count: int) -> tuple[Kind, ...]:
    """`count` times the same kind."""
    return (kind,) * count


def layer_of_kind(fields: Fields, kind: Kind, row: Row) -> LayerGeometry | None:
    """The cache layer that a model layer of this kind owns; None for a recurrent one."""
    if kind == "recurrent":
        return None
    if kind == "flat":
        return row.flat()
    name = "sliding_window" if kind == "ring" else "attention_chunk_size"
    if fields.raw(name) is None:
        raise fields.error(name, None, f"a positive integer, since there are {kind} layers")
    return row.ring(fields.integer(name))


def stack_kinds(
    fields: Fields, kinds: Sequence[Kind], rows: Sequence[Row], shared: int = 0
) -> CacheGeometry:
    """One model layer for each kind, with its row; the last `shared` own nothing.

    Those read the last earlier owner of their kind. Raises `GeometryError` when there is none.
    """
    owned = len(kinds) - shared
    if shared and owned < 1:
        raise fields.error(
            "num_kv_shared_layers", shared, f"less than the number of layers ({len(kinds)})"
        )
    stack = Stack()
    last_owner: dict[Kind, int] = {}
    for index, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
        if index >= owned:
            if kind not in last_owner:
                raise GeometryError(
                    f"layer {index} of {fields.family} shares the keys and values of an earlier "
                    f"{kind} layer, but none of the first {owned} layers is one; correct "
                    f"'num_kv_shared_layers' ({shared}) or 'layer_types' in the config.json"
                )
            stack.share(last_owner[kind])
            continue
        layer = layer_of_kind(fields, kind, row)
        if layer is None:
            stack.recur()
        else:
            last_owner[kind] = len(stack.layers)
            stack.attend(layer)
    return stack.build()
