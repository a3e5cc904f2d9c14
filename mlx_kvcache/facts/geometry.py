"""What the model is: its cache layers, read from a config or from metadata, and written to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from mlx_kvcache.facts.hf.from_config import KEPT_BY_MLX_LM, layers_from_hf
from mlx_kvcache.facts.layers import LayerGeometry, LayerMap, LayerPolicy, ModelLayer
from mlx_kvcache.facts.metadata import layers_from_metadata, metadata_of

__all__ = ["CacheGeometry", "LayerGeometry", "LayerPolicy", "ModelLayer"]


@dataclass(frozen=True)
class CacheGeometry(LayerMap):
    """The cache layers of a model, in the order in which the model indexes them.

    layers: one `LayerGeometry` for each cache layer. model_layers: maps each model layer to its
    cache layers; when it is not given, model layer i reads cache layer i. Raises `GeometryError`
    for an empty or inconsistent description.
    """

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | PathLike[str] | object) -> CacheGeometry:
        """The geometry that a Hugging Face config describes: what the model attends.

        `config` is a transformers config object, the dict of a config.json, or a path to that
        file or to the directory that holds it. Raises `ModelNotFoundError` for a path that leads to
        no config, `GeometryError` when a field is missing or malformed, and
        `UnknownLayerTypeError` for a layer type or family without a known rule.
        """
        found = layers_from_hf(config)
        return cls(found.layers, found.model_layers)

    @classmethod
    def of_mlx_lm(cls, config: Mapping[str, Any] | str | PathLike[str] | object) -> CacheGeometry:
        """The geometry of the caches that mlx-lm makes for a config.

        It keeps more than the model attends where mlx-lm ignores a window; docs/model_families.md
        lists the families. Takes and raises what `from_hf` does.
        """
        found = layers_from_hf(config, KEPT_BY_MLX_LM)
        return cls(found.layers, found.model_layers)

    def to_metadata(self) -> dict[str, Any]:
        """The geometry in plain JSON types, to be published beside a model or in a saved cache.

        Every call makes a new dict. Raises `MetadataError` when this object breaks its own rules.
        """
        return metadata_of(self)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> CacheGeometry:
        """The geometry that `to_metadata` described; fields unknown to this version are ignored.

        Raises `MetadataError` for a missing field, an unknown version or a malformed value.
        """
        found = layers_from_metadata(metadata)
        return cls(found.layers, found.model_layers)
