"""What `mlx-kvcache op` runs on: the tensors, and a cache that they fit."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_kvcache.commands.op_options import OpOptions
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy

Array = np.ndarray[Any, Any]

_NAMES = ("queries", "keys", "values")


@dataclass(frozen=True)
class Tensors:
    """queries [L, B, Hq, N, D], keys [L, B, H, N, D], values [L, B, H, N, Dv] and sinks [Hq].

    L cache layers, N positions; float32.
    """

    queries: Array
    keys: Array
    values: Array
    sinks: Array | None = None

    @property
    def positions(self) -> int:
        """N."""
        return int(self.keys.shape[3])

    @classmethod
    def drawn(cls, options: OpOptions, positions: int) -> Tensors:
        """Standard normal numbers; the same ones for the same seed."""
        random = np.random.default_rng(options.seed or 0)

        def draw(*shape: int) -> Array:
            return random.standard_normal(shape).astype(np.float32)

        cache = options.cache
        outer = (cache.layers, options.batch or 1)
        query_heads = options.query_heads or cache.heads
        return cls(
            draw(*outer, query_heads, positions, cache.dim),
            draw(*outer, cache.heads, positions, cache.dim),
            draw(*outer, cache.heads, positions, options.value_dim or cache.dim),
            draw(query_heads) if options.sinks else None,
        )

    @classmethod
    def from_file(cls, path: Path, layers: int) -> Tensors:
        """The arrays of an .npz file; those of four axes serve every layer.

        Raises `ConfigError` for a file that is not one, or lacks an array, or has one of another
        form.
        """
        arrays = _read(path)
        missing = [name for name in _NAMES if name not in arrays]
        if missing:
            raise ConfigError(
                f"{path} has no {', '.join(missing)}; it needs queries, keys and values "
                "[B, H, N, D], or [L, B, H, N, D] for L cache layers, and may have sinks [Hq]"
            )
        queries, keys, values = (_numbers(path, name, arrays[name], layers) for name in _NAMES)
        sinks = arrays.get("sinks")
        if sinks is not None and (sinks.dtype.kind != "f" or sinks.ndim != 1):
            raise ConfigError(f"{path}: sinks must be numbers [Hq], got {_described(sinks)}")
        sinks = None if sinks is None else sinks.astype(np.float32)
        tensors = cls(queries, keys, values, sinks)
        tensors._check(path)
        return tensors

    def _check(self, path: Path) -> None:
        queries, keys, values = self.queries.shape, self.keys.shape, self.values.shape
        fits = keys[:4] == values[:4] and (queries[1], *queries[3:]) == (keys[1], *keys[3:])
        if not fits or min(*queries, *keys, *values) < 1:
            raise ConfigError(
                f"{path}: queries {list(queries[1:])}, keys {list(keys[1:])} and values "
                f"{list(values[1:])} do not fit together as [B, Hq, N, D], [B, H, N, D] and "
                "[B, H, N, Dv]"
            )


def _read(path: Path) -> dict[str, Array]:
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ConfigError(f"{path} holds a single array; --tensors needs an .npz file")
        with file:
            return {name: file[name] for name in file.files}
    except ConfigError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not an .npz file of numbers: {error}") from error


def _numbers(path: Path, name: str, array: Array, layers: int) -> Array:
    if array.dtype.kind != "f" or array.ndim not in (4, 5):
        raise ConfigError(
            f"{path}: {name} must be floating-point numbers of 4 or 5 axes, got {_described(array)}"
        )
    if array.ndim == 4:
        array = np.broadcast_to(array, (layers, *array.shape))
    if array.shape[0] != layers:
        raise ConfigError(
            f"{path}: {name} are for {array.shape[0]} cache layers, --kv-cache says {layers}"
        )
    return array.astype(np.float32)


def _described(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


@dataclass(frozen=True)
class OpRequest:
    """A run of the op: a cache, the tensors, and how the positions are cut into steps."""

    geometry: CacheGeometry
    config: CacheConfig
    tensors: Tensors
    steps: tuple[int, ...]
    scale: float
    softcap: float | None
    tolerance: float

    @classmethod
    def of(cls, options: OpOptions) -> OpRequest:
        """Raises `ConfigError` or `GeometryError` when the parts do not fit together."""
        cache, steps = options.cache, options.step_tokens
        if options.tensors is not None:
            tensors = Tensors.from_file(options.tensors, cache.layers)
        else:
            tensors = Tensors.drawn(options, sum(steps or ()))
        steps = steps or (tensors.positions,)
        if (tensors.keys.shape[2], tensors.keys.shape[4]) != (cache.heads, cache.dim):
            raise ConfigError(
                f"--kv-cache says {cache.heads} heads of dim {cache.dim}, but the keys have "
                f"{tensors.keys.shape[2]} of dim {tensors.keys.shape[4]}"
            )
        if sum(steps) != tensors.positions:
            raise ConfigError(
                f"--steps {','.join(map(str, steps))} are {sum(steps)} positions, but the tensors "
                f"have {tensors.positions}"
            )
        if sum(steps) > cache.capacity:
            raise ConfigError(
                f"--steps are {sum(steps)} positions, more than the capacity {cache.capacity} of "
                "--kv-cache"
            )
        flat = LayerGeometry(
            LayerPolicy.flat(), cache.heads, cache.dim, int(tensors.values.shape[4])
        )
        return cls(
            CacheGeometry((flat,) * cache.layers).with_windows(
                options.cache_windows * cache.layers
                if len(options.cache_windows) == 1
                else options.cache_windows
            ),
            CacheConfig(cache.capacity, cache.dtype, spare=options.spare),
            tensors,
            steps,
            cache.dim**-0.5 if options.scale is None else options.scale,
            options.softcap,
            options.tolerance,
        )
