"""What a loaded mlx-lm model caches, read off its own cache objects during one lazy forward.

A config says what a family's rules make of it; the model itself says what it does. One token is
pushed through the model with mlx-lm's caches, nothing is evaluated, and the shapes of the arrays
that the caches were given are the geometry.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from mlx_kvcache.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer

#: mlx-lm's own classes. A subclass may do anything, so it stays with whoever defined it.
KV_CACHE_TYPES = (KVCache, RotatingKVCache, ChunkedKVCache)


@dataclass(frozen=True)
class TracedGeometry:
    """The geometry of a loaded model, and the list that its forward pass expects.

    geometry: the KV cache layers in traversal order (a `CacheList` contributes its children in
        order); one `ModelLayer` for each entry of the list, `recurrent` where the entry is, or
        holds, an object that is not a KV cache. A model with shared or cache-free layers has
        more layers than entries.
    template: the model's own, never written cache objects. Whoever replaces the KV caches in it
        (see `is_kv_cache`), in traversal order, has a list that the model accepts. Take a fresh
        one with `fresh_template` before handing its recurrent entries to a second sequence.
    """

    geometry: CacheGeometry
    template: list[Any]


def is_kv_cache(cache: object) -> bool:
    """Whether this is an mlx-lm KV cache that a cache layer of ours can stand in for."""
    return type(cache) in KV_CACHE_TYPES


def fresh_template(model: Module) -> list[Any]:
    """A new list of the model's own cache objects, never written."""
    return list(make_prompt_cache(model))


def leaves(cache: object) -> Iterator[Any]:
    """The cache objects of one list entry: itself, or the children of a `CacheList` in order."""
    if isinstance(cache, CacheList):
        for child in cache.caches:
            yield from leaves(child)
    else:
        yield cache


def trace_geometry(model: Module) -> TracedGeometry:
    """The geometry that `model` fills when it runs one token; nothing is evaluated.

    `LayerGeometry.shared` is set where the forward reads a layer's rows again after its update
    through `keys_and_values`; a model that hands on the updated arrays themselves leaves no
    trace of it. Raises `GeometryError` for a model without KV caches, for a KV cache that the
    forward never writes, and for a rotating cache with `keep` rows.
    """
    entries = fresh_template(model)
    layers: list[_Probe] = []
    model_layers = []
    for entry in entries:
        own = []
        recurrent = False
        for cache in leaves(entry):
            if is_kv_cache(cache):
                own.append(len(layers))
                layers.append(_Probe(len(layers), cache))
            else:
                recurrent = True
        model_layers.append(ModelLayer(tuple(own), recurrent=recurrent))
    if not layers:
        kinds = sorted({type(cache).__name__ for entry in entries for cache in leaves(entry)})
        raise GeometryError(
            f"{type(model).__module__}.{type(model).__name__} makes no KV cache "
            f"(its cache list holds: {', '.join(kinds) or 'nothing'}); a purely recurrent model "
            "has nothing for this cache to hold, use mlx-lm's own cache for it"
        )
    model(mx.zeros((1, 1), mx.int32), cache=entries)
    geometry = CacheGeometry(tuple(layer.geometry() for layer in layers), tuple(model_layers))
    return TracedGeometry(geometry, fresh_template(model))


class _Probe:
    """Watches one mlx-lm KV cache through a forward pass and says what it was given."""

    def __init__(self, index: int, cache: Any) -> None:
        self.index = index
        self.cache = cache
        self.policy = _policy(index, cache)
        self.reads = 0
        self.writes = 0
        read, write = cache.keys_and_values, cache.update_and_fetch

        def keys_and_values() -> Any:
            self.reads += 1
            return read()

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self.writes += 1
            return write(keys, values)

        cache.keys_and_values = keys_and_values
        cache.update_and_fetch = update_and_fetch

    def geometry(self) -> LayerGeometry:
        keys, values = self.cache.keys, self.cache.values
        if keys is None or values is None:
            raise GeometryError(
                f"cache layer {self.index} ({type(self.cache).__name__}) was never written in a "
                "forward pass of one token, so its heads and dims cannot be read; describe the "
                "model with CacheGeometry.from_hf(config), or use mlx-lm's own cache for it"
            )
        if keys.shape[:2] != values.shape[:2]:
            raise GeometryError(
                f"cache layer {self.index} was given keys of shape {keys.shape} and values of "
                f"shape {values.shape}; both must have the same batch size and KV heads"
            )
        return LayerGeometry(
            self.policy,
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
                f"cache layer {index} is a RotatingKVCache that keeps its first {cache.keep} rows "
                "for good (keep != 0); only keep=0 is a sliding window. Make the model's caches "
                "without keep, or use mlx-lm's own cache"
            )
        return LayerPolicy.ring(cache.max_size)
    if isinstance(cache, ChunkedKVCache):
        return LayerPolicy.ring(cache.chunk_size)
    return LayerPolicy.flat()
