"""Caches without arrays, and the geometry that the tests share."""

from __future__ import annotations

from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy

GEOMETRY = CacheGeometry(
    (
        LayerGeometry(LayerPolicy.flat(), kv_heads=1, key_dim=4, value_dim=4),
        LayerGeometry(LayerPolicy.ring(4), kv_heads=1, key_dim=4, value_dim=4),
    )
)
CONFIG = CacheConfig(capacity=32, initial_capacity=2, spare=3)


class PlainCache:
    """What every cache has, and nothing else."""

    def __init__(self, geometry: CacheGeometry, config: CacheConfig) -> None:
        self.geometry = geometry
        self.config = config

    @property
    def capacity(self) -> int:
        return self.config.capacity

    @property
    def nbytes(self) -> int:
        return 0


def plain() -> PlainCache:
    return PlainCache(GEOMETRY, CONFIG)
