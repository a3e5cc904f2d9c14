"""Which kind of memory each layer of a model has, as its config names or counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mlx_kvcache.errors import GeometryError, UnknownLayerTypeError
from mlx_kvcache.facts.hf.fields import Fields

#: What a layer keeps: all rows, those of a window, those of a chunk, a state, or nothing.
MemoryKind = Literal["flat", "ring", "chunk", "recurrent", "none"]
#: The kind of every layer of a model, bottom up.
KindsOf = Callable[[Fields], tuple[MemoryKind, ...]]

#: Layer types as configs spell them, old and new, and what a layer of that type keeps.
LAYER_TYPES: Mapping[str, MemoryKind] = {
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

ANY: tuple[MemoryKind, ...] = ("flat", "ring", "chunk", "recurrent")
ATTENTION: tuple[MemoryKind, ...] = ("flat", "ring", "chunk")
SLIDING: tuple[MemoryKind, ...] = ("flat", "ring")
HYBRID: tuple[MemoryKind, ...] = ("flat", "recurrent")


def kinds_of(
    fields: Fields, types: Sequence[str], allowed: Sequence[MemoryKind] = ANY
) -> tuple[MemoryKind, ...]:
    """The kind of each layer type.

    Raises `UnknownLayerTypeError` for a type without a rule, or of a kind that the family's model
    does not have.
    """
    known = [name for name, kind in LAYER_TYPES.items() if kind in allowed]
    for index, name in enumerate(types):
        if name not in known:
            raise UnknownLayerTypeError(
                f"layer {index} of {fields.family} has the layer type {name!r}, whose caching rule "
                f"is not known; known are {', '.join(known)}. A wrong guess would lose rows: "
                "trace the loaded model instead (mlx_kvcache.integrations.tracing)"
            )
    return tuple(LAYER_TYPES[name] for name in types)


def listed_kinds(
    fields: Fields, allowed: Sequence[MemoryKind] = ANY
) -> tuple[MemoryKind, ...] | None:
    """The kinds that the config's own layer_types name, or None where it has no such list."""
    types = fields.words("layer_types", fields.layer_count)
    return None if types is None else kinds_of(fields, types, allowed)


def resolved_kinds(
    fields: Fields, own_field: str, own: tuple[MemoryKind, ...]
) -> tuple[MemoryKind, ...]:
    """The kinds by the family's own field, or by layer_types where only that is given.

    Raises `GeometryError` when the config gives both and they contradict each other.
    """
    listed = listed_kinds(fields)
    if listed is None or listed == own:
        return own
    if fields.given(own_field):
        layer = next(index for index, kind in enumerate(listed) if kind != own[index])
        raise GeometryError(
            f"config fields {own_field!r} ({fields.raw(own_field)!r}) and 'layer_types' of "
            f"{fields.family} contradict each other at layer {layer}: {own[layer]} against "
            f"{listed[layer]}. Correct one of them in the model's config.json"
        )
    return listed


def every(period: int, count: int, other: MemoryKind, offset: int = -1) -> tuple[MemoryKind, ...]:
    """`count` kinds: flat where index % period is `offset` (the last of a period), else `other`."""
    offset %= period
    return tuple("flat" if index % period == offset else other for index in range(count))


def all_of(kind: MemoryKind, count: int) -> tuple[MemoryKind, ...]:
    """`count` times the same kind."""
    return (kind,) * count


def flat(fields: Fields) -> tuple[MemoryKind, ...]:
    """Every layer keeps everything, whatever windows the config mentions."""
    # mlx-lm does not look at the list here; one that speaks of states is another model's.
    listed_kinds(fields, ATTENTION)
    return all_of("flat", fields.layer_count)


def by_layer_types(
    allowed: Sequence[MemoryKind] = SLIDING, period: int = 1, other: MemoryKind = "ring"
) -> KindsOf:
    """layer_types decide, within the `allowed` kinds.

    Where the list is absent, each period-th layer is full and the rest are `other`.
    """

    def kinds(fields: Fields) -> tuple[MemoryKind, ...]:
        return listed_kinds(fields, allowed) or every(period, fields.layer_count, other)

    return kinds


def required_layer_types(allowed: Sequence[MemoryKind]) -> KindsOf:
    """layer_types, which must be given, decide within the `allowed` kinds."""

    def kinds(fields: Fields) -> tuple[MemoryKind, ...]:
        listed = listed_kinds(fields, allowed)
        if listed is None:
            raise fields.error("layer_types", None, "a list of layer types")
        return listed

    return kinds


def every_nth(period_field: str, other: MemoryKind) -> KindsOf:
    """Layers n, 2n, ... (counted from 1) are full, the others sliding or recurrent."""

    def kinds(fields: Fields) -> tuple[MemoryKind, ...]:
        own = every(fields.integer(period_field), fields.layer_count, other)
        return resolved_kinds(fields, period_field, own)

    return kinds


def by_pattern(fields: Fields) -> tuple[MemoryKind, ...]:
    """By sliding_window_pattern: a period whose last layer is full, or a word of L and G."""
    pattern, count = fields.raw("sliding_window_pattern"), fields.layer_count
    if not isinstance(pattern, str):
        return every(fields.integer("sliding_window_pattern"), count, "ring")
    if not pattern or set(pattern) - {"L", "G"}:
        raise fields.error("sliding_window_pattern", pattern, "a word of the letters L and G")
    return tuple(
        "ring" if pattern[index % len(pattern)] == "L" else "flat" for index in range(count)
    )
