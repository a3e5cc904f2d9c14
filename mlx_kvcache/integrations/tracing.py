"""What a loaded mlx-lm model caches, read off its own cache objects during one lazy forward.

A config says what a family's rules make of it; the model itself says what it does. One token is
pushed through the model with mlx-lm's caches, nothing is evaluated, and the shapes of the arrays
that the caches were given are the geometry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer

#: mlx-lm's own classes. A subclass may do anything, so it stays with whoever defined it.
KV_CACHE_TYPES = (KVCache, RotatingKVCache, ChunkedKVCache)


@dataclass(frozen=True)
class TracedGeometry:
    """The geometry of a loaded model, and the list that its forward pass expects.

    geometry: the KV cache layers in traversal order (a `CacheList` contributes its children in
        order); one `ModelLayer` for each entry of the list, `recurrent` where the entry is, or
        holds, an object that is not a KV cache. A model with shared or cache-free layers has
        more layers than entries.
    template: the model's own, never written cache objects.
    written: for each KV cache of the template, in traversal order, whether the forward pass
        writes it. One that is not written stays mlx-lm's own and is no layer of the geometry.
    weight_bytes: of all the model's weights when it was traced.
    """

    geometry: CacheGeometry
    template: list[Any]
    written: tuple[bool, ...]
    weight_bytes: int

    def with_layers(self, layers: Iterable[Any]) -> list[Any]:
        """The template with one of `layers` for each cache layer of the geometry.

        Its recurrent entries are handed out as they are, so it serves one sequence only.
        """
        replacements, written = iter(layers), iter(self.written)

        def replaced(entry: Any) -> Any:
            if isinstance(entry, CacheList):
                return CacheList(*(replaced(child) for child in entry.caches))
            return next(replacements) if is_kv_cache(entry) and next(written) else entry

        return [replaced(entry) for entry in self.template]


def is_kv_cache(cache: object) -> bool:
    """Whether this is an mlx-lm KV cache that a cache layer of ours can stand in for."""
    return type(cache) in KV_CACHE_TYPES


def leaves(cache: object) -> Iterator[Any]:
    """The cache objects of one list entry: itself, or the children of a `CacheList` in order."""
    if isinstance(cache, CacheList):
        for child in cache.caches:
            yield from leaves(child)
    else:
        yield cache


def weight_places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of an array in a tree of modules, as its container and its key there."""
    places: list[tuple[Any, Any]] = []
    trees = [tree]
    for each in trees:
        for key, value in each.items() if isinstance(each, dict) else enumerate(each):
            if isinstance(value, mx.array):
                places.append((each, key))
            elif isinstance(value, dict | list):
                trees.append(value)
    return places


def weight_bytes(model: Module) -> int:
    """Bytes of all the weights of a model, loaded or not."""
    tree = model if isinstance(model, dict) else model.parameters()
    return sum(
        [
            int(place[key].nbytes)
            for place, key in weight_places(tree)
            # What mlx.nn takes for no parameter, such as the frequencies of an embedding.
            if not str(key).startswith("_")
        ]
    )


def trace_geometry(model: Module) -> TracedGeometry:
    """The geometry that `model` fills when it runs one token; nothing is evaluated.

    A ring is given the wider of the cache's size and of the window that the model asks a mask
    for: a model whose caches are narrower than its masks would answer otherwise for other chunks.
    `LayerGeometry.shared` is set where the forward reads a layer's rows again after its update
    through `keys_and_values`; a model that hands on the updated arrays themselves leaves no
    trace of it. The model keeps the trace until its layers or its choices change. Raises
    `GeometryError` for a model that writes no KV cache, and for a rotating cache with `keep` rows.
    """
    template = list(make_prompt_cache(model))
    layers = tuple(getattr(model, "layers", ()))
    signature = _signature(model, template, layers)
    kept: _Kept | None = getattr(model, _KEPT, None)
    if kept is None or kept.signature != signature:
        kept = _Kept(signature, layers, *_traced(model), weight_bytes(model))
        # A model that takes no attribute is traced each time.
        with suppress(AttributeError):
            setattr(model, _KEPT, kept)
    return TracedGeometry(kept.geometry, template, kept.written, kept.weight_bytes)


def _traced(model: Module) -> tuple[CacheGeometry, tuple[bool, ...]]:
    """The geometry of a model, and which KV caches of its list it writes."""
    entries = list(make_prompt_cache(model))
    probes = [_Probe(cache) for entry in entries for cache in leaves(entry) if is_kv_cache(cache)]
    policies = [_policy(index, probe.cache) for index, probe in enumerate(probes)]
    model(mx.zeros((1, 1), mx.int32), cache=entries)
    written = [probe for probe in probes if probe.cache.keys is not None]
    if not written:
        kinds = sorted({type(cache).__name__ for entry in entries for cache in leaves(entry)})
        raise GeometryError(
            f"{type(model).__module__}.{type(model).__name__} writes no KV cache "
            f"(its cache list holds: {', '.join(kinds) or 'nothing'}); a purely recurrent model "
            "has nothing for this cache to hold, use mlx-lm's own cache for it"
        )
    asked: dict[int, int] = {}
    for policy, probe in zip(policies, probes, strict=True):
        asked[policy.window] = max(asked.get(policy.window, 0), probe.mask_window)
    layers = []
    for index, (policy, probe) in enumerate(zip(policies, probes, strict=True)):
        if probe in written:
            if policy.window:
                policy = LayerPolicy.ring(max(policy.window, asked[policy.window]))
            layers.append(probe.geometry(index, policy))
    geometry = CacheGeometry(tuple(layers), _model_layers(entries, written))
    return geometry, tuple(probe in written for probe in probes)


#: Where a model keeps its trace.
_KEPT = "_mlx_kvcache_trace"
#: What mlx-lm's caches name their sizes.
_SIZES = ("max_size", "keep", "chunk_size")
#: Attributes of these types may be choices, such as a window.
_CHOICE_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class _Kept:
    """A trace, and what it was taken of: while that is the same, so is the trace.

    layers: kept alive, so that what the signature says of their identity stays true.
    """

    signature: tuple[Any, ...]
    layers: tuple[Any, ...]
    geometry: CacheGeometry
    written: tuple[bool, ...]
    weight_bytes: int


def _signature(model: Module, template: list[Any], layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a trace depends on: the caches' own sizes, the layers, and the choices around them."""
    caches = tuple(
        (type(cache), *(getattr(cache, name, None) for name in _SIZES))
        for entry in template
        for cache in leaves(entry)
    )
    parts = [model, getattr(model, "args", None)]
    if isinstance(model, Module):
        parts += _parts_beside(model, {id(layer) for layer in layers})
    choices = tuple(
        (name, value)
        for part in parts
        for name, value in getattr(part, "__dict__", {}).items()
        if isinstance(value, _CHOICE_TYPES)
    )
    return caches, tuple(map(id, layers)), choices


def _parts_beside(module: Module, layers: set[int]) -> Iterator[Module]:
    """The modules within a module that are none of the layers, nor within them."""
    for part in module.values():
        if isinstance(part, Module) and id(part) not in layers:
            yield part
            yield from _parts_beside(part, layers)


def _model_layers(entries: list[Any], written: list[_Probe]) -> tuple[ModelLayer, ...]:
    index_of = {id(probe.cache): index for index, probe in enumerate(written)}
    model_layers = []
    for entry in entries:
        caches = list(leaves(entry))
        own = tuple(index_of[id(cache)] for cache in caches if id(cache) in index_of)
        recurrent = not all(is_kv_cache(cache) for cache in caches)
        model_layers.append(ModelLayer(own, recurrent=recurrent))
    return tuple(model_layers)


class _Probe:
    """Watches one mlx-lm KV cache through a forward pass and says what it was given."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.reads = 0
        self.writes = 0
        self.mask_window = 0
        read, write = cache.keys_and_values, cache.update_and_fetch
        make_mask = getattr(cache, "make_mask", None)

        def keys_and_values() -> Any:
            self.reads += 1
            return read()

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self.writes += 1
            return write(keys, values)

        cache.keys_and_values = keys_and_values
        cache.update_and_fetch = update_and_fetch
        if make_mask is not None:

            def watched_mask(*args: Any, **choices: Any) -> Any:
                self.mask_window = max(self.mask_window, choices.get("window_size") or 0)
                return make_mask(*args, **choices)

            cache.make_mask = watched_mask

    def geometry(self, index: int, policy: LayerPolicy) -> LayerGeometry:
        keys, values = self.cache.keys, self.cache.values
        if keys.shape[:2] != values.shape[:2]:
            raise GeometryError(
                f"KV cache {index} of the model was given keys of shape {keys.shape} and values of "
                f"shape {values.shape}; both must have the same batch size and KV heads"
            )
        return LayerGeometry(
            policy,
            kv_heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            # update_and_fetch reads once itself; every further read is another layer's.
            shared=self.reads > self.writes,
        )


def _policy(index: int, cache: Any) -> LayerPolicy:
    if isinstance(cache, RotatingKVCache):
        if cache.keep != 0:
            raise GeometryError(
                f"KV cache {index} of the model is a RotatingKVCache that keeps its first "
                f"{cache.keep} rows for good (keep != 0); only keep=0 is a sliding window. Make "
                "the model's caches without keep, or use mlx-lm's own cache"
            )
        return LayerPolicy.ring(cache.max_size)
    if isinstance(cache, ChunkedKVCache):
        return LayerPolicy.ring(cache.chunk_size)
    return LayerPolicy.flat()
