"""The former place of the geometry, kept for scripts that import it."""

import warnings

from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer

__all__ = ["CacheGeometry", "LayerGeometry", "LayerPolicy", "ModelLayer"]

warnings.warn(
    "mlx_kvcache.geometry has moved: import its names from mlx_kvcache",
    DeprecationWarning,
    stacklevel=2,
)
