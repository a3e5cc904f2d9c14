"""The layers of a model, sorted into kinds: what a person wants to see of a geometry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry


@dataclass(frozen=True)
class LayerKind:
    """What the layers of one kind have in common.

    kind: "flat" and "ring" own a cache layer; "shared" reads the rows of `owner`, a model layer;
        "recurrent" has a state of its own and no rows; "none" has neither.
    cache: the cache layer's facts; None for "recurrent" and "none".
    ordinal: which of its layer's caches this is, where a layer has several.
    state: whether the layer also has a recurrent state.
    """

    kind: Literal["flat", "ring", "shared", "recurrent", "none"]
    cache: LayerGeometry | None = None
    owner: int | None = None
    ordinal: int = 0
    state: bool = False

    @property
    def owns_rows(self) -> bool:
        """Whether layers of this kind take memory of the cache."""
        return self.kind in ("flat", "ring")


@dataclass(frozen=True)
class LayerGroup:
    """All layers of one kind: model layers, and the cache layers they read."""

    kind: LayerKind
    model_layers: tuple[int, ...]
    cache_layers: tuple[int, ...]


def layer_groups(geometry: CacheGeometry) -> tuple[LayerGroup, ...]:
    """The layers by kind, in the order in which the kinds first appear.

    Every cache layer stands in exactly one group that owns rows; one that no model layer claims
    stands in a group without model layers.
    """
    groups: dict[LayerKind, tuple[list[int], list[int]]] = {}
    for kind, model_layer, cache_layer in _entries(geometry):
        model_layers, cache_layers = groups.setdefault(kind, ([], []))
        if model_layer is not None:
            model_layers.append(model_layer)
        if cache_layer is not None:
            cache_layers.append(cache_layer)
    return tuple(
        LayerGroup(kind, tuple(model_layers), tuple(cache_layers))
        for kind, (model_layers, cache_layers) in groups.items()
    )


def _entries(geometry: CacheGeometry) -> Iterator[tuple[LayerKind, int | None, int | None]]:
    """One entry for each cache that a model layer reads, or for a layer that reads none."""
    owners = _owners(geometry)
    for number, layer in enumerate(geometry.model_layers):
        if not layer.caches:
            yield LayerKind("recurrent" if layer.recurrent else "none"), number, None
        for ordinal, index in enumerate(layer.caches):
            cache = _plain(geometry.layers[index])
            owner = owners.get(index)
            if owner == number:
                kind = LayerKind(cache.policy.kind, cache, None, ordinal, layer.recurrent)
            else:
                kind = LayerKind("shared", cache, owner, ordinal, layer.recurrent)
            yield kind, number, index
    for index, cache in enumerate(geometry.layers):
        if index not in owners:
            yield LayerKind(cache.policy.kind, _plain(cache)), None, index


def _plain(cache: LayerGeometry) -> LayerGeometry:
    """The facts by which layers are one kind: who else reads their rows is not among them."""
    return replace(cache, shared=False)


def _owners(geometry: CacheGeometry) -> dict[int, int]:
    """The model layer that writes each cache layer."""
    owners: dict[int, int] = {}
    for number, layer in enumerate(geometry.model_layers):
        if not layer.shares:
            for index in layer.caches:
                owners.setdefault(index, number)
    return owners


def summary(geometry: CacheGeometry) -> str:
    """The cache layers in one phrase: "3 flat + 15 ring(512)"."""
    counts: dict[int, int] = {}
    for window in geometry.windows:
        counts[window] = counts.get(window, 0) + 1
    parts = [f"{counts[0]} flat"] if 0 in counts else []
    parts += [f"{counts[window]} ring({window})" for window in sorted(counts) if window]
    states = sum(layer.recurrent for layer in geometry.model_layers)
    if states:
        parts.append(f"{states} recurrent (kept by mlx-lm)")
    return " + ".join(parts)
