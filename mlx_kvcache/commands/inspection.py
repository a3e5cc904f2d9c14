"""The facts that `inspect` shows, worked out of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_kvcache.commands.loading import position_limit
from mlx_kvcache.facts.config import MAX_CAPACITY, CacheConfig, item_size
from mlx_kvcache.facts.files import expanded
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.facts.layer_kinds import LayerGroup, layer_groups
from mlx_kvcache.layout.footprint import (
    Extent,
    Footprint,
    bytes_per_token,
    footprint,
    mlx_lm_chunked_rows,
    mlx_lm_rows,
    rotating_prefill_rows,
    sequence_footprint,
)

#: The context of a model whose config names none.
FALLBACK_CONTEXT = 32768
#: Families whose windows mlx-lm keeps in chunked caches, not in rotating ones.
_CHUNKED_FAMILIES = ("llama4",)


@dataclass(frozen=True)
class Inspection:
    """What a model's cache looks like and takes at `own.tokens` tokens.

    own: the bytes in our cache; theirs: in mlx-lm's caches. Both in `config.kv_dtype`.
    prefill: the most bytes that mlx-lm's rotating caches hold during a prefill of that length;
        None where the model has none.
    """

    name: str
    family: str
    geometry: CacheGeometry
    groups: tuple[LayerGroup, ...]
    config: CacheConfig
    own: Footprint
    theirs: Footprint
    prefill: int | None

    @property
    def size(self) -> int:
        """Bytes of one stored number."""
        return item_size(self.config.kv_dtype)

    def bytes_per_token(self, window: bool | None = None) -> int:
        """Bytes of one token in all cache layers, or in those with (True) or without a window."""
        return sum(
            bytes_per_token(layer, self.size)
            for layer in self.geometry.layers
            if window is None or bool(layer.policy.window) is window
        )

    def group_extent(self, group: LayerGroup, of: Footprint) -> Extent:
        """The bytes of a group; zero for one that owns no rows."""
        layers = group.cache_layers if group.kind.owns_rows else ()
        return Extent(
            sum(of.layers[index].used for index in layers),
            sum(of.layers[index].allocated for index in layers),
        )


def inspection(name: str, context: int | None, kv_dtype: str) -> Inspection:
    """Inspect the model of that name at a length of `context` tokens (None: its own).

    Raises what `read_model_config` and `CacheGeometry.of_mlx_lm` raise.
    """
    config = read_model_config(name)
    limit = position_limit(config)
    tokens = context or limit or FALLBACK_CONTEXT
    # The capacity that `generate` gives the cache, unless the question goes beyond it.
    capacity = max(limit or MAX_CAPACITY, tokens)
    size = item_size(kv_dtype)
    geometry = CacheGeometry.of_mlx_lm(config)
    family = str(config.get("model_type") or "")
    chunked = family in _CHUNKED_FAMILIES
    cache_config = CacheConfig(capacity=capacity, kv_dtype=kv_dtype)
    theirs = footprint(geometry, tokens, size, mlx_lm_chunked_rows if chunked else mlx_lm_rows)
    rotating = any(geometry.windows) and not chunked
    return Inspection(
        name,
        family,
        geometry,
        layer_groups(geometry),
        cache_config,
        sequence_footprint(geometry, tokens, cache_config, size),
        theirs,
        _prefill_bytes(geometry, theirs, size) if rotating else None,
    )


def read_model_config(name: str) -> Mapping[str, Any]:
    """The config of a model by any of its names, or a JSON file of any name, read without MLX.

    Raises `ModelNotFoundError`, `ModelFormatError`, `GeometryError` or `UnsupportedModelError`.
    """
    path = expanded(name)
    if path.suffix == ".json" and path.is_file():
        from mlx_kvcache.facts.hf.from_config import read_config

        return read_config(path)
    from mlx_kvcache import models

    return models.read_config(name)


def _prefill_bytes(geometry: CacheGeometry, theirs: Footprint, size: int) -> int:
    """What mlx-lm's caches hold at most while all tokens are prefilled."""
    return sum(
        rotating_prefill_rows(layer.policy.window, theirs.tokens) * bytes_per_token(layer, size)
        if layer.policy.window
        else extent.allocated
        for layer, extent in zip(geometry.layers, theirs.layers, strict=True)
    )
