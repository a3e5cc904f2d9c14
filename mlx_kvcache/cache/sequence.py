"""MLXSequenceCache: the keys and values of one sequence, or of a batch that advances together."""

from __future__ import annotations

import mlx.core as mx

from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.step import PolicyStep
from mlx_kvcache.errors import CapacityError, LayerIndexError, PositionError, RewindError
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.write import prefers_array_start

_DTYPE_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


class MLXSequenceCache:
    """The KV cache of a model, as MLX arrays that grow by lazy capacity doubling.

    Layers that attend to everything keep every row; layers with a sliding window keep a ring
    with `config.spare` spare rows, so that it can be rewound after it wrapped. All layers
    share one logical length.

    `layer_class` lets an adapter add its own protocol to the layer objects.
    Raises `GeometryError` or `ConfigError` when geometry and config do not fit together.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        config: CacheConfig | None = None,
        layer_class: type[SequenceLayer] = SequenceLayer,
    ) -> None:
        config = CacheConfig() if config is None else config
        validate(geometry, config)
        self.geometry = geometry
        self.config = config
        policies = [layer.policy for layer in geometry.layers]
        self.layout = SequenceLayout(policies, config.capacity, config.spare)
        self._steps = self._make_steps(policies)
        dtype = None if config.kv_dtype is None else getattr(mx, config.kv_dtype)
        self.layers = tuple(
            layer_class(index, layer, self._steps[layer.policy], dtype)
            for index, layer in enumerate(geometry.layers)
        )

    def _make_steps(self, policies: list[LayerPolicy]) -> dict[LayerPolicy, PolicyStep]:
        itemsize = _DTYPE_SIZES.get(self.config.kv_dtype or "", 2)
        elements = sum(layer.elements_per_position for layer in self.geometry.layers)
        array_start = prefers_array_start(elements * itemsize)
        steps: dict[LayerPolicy, PolicyStep] = {}
        for index, policy in enumerate(policies):
            if policy not in steps:
                steps[policy] = PolicyStep(
                    self.layout, index, self.config.initial_capacity, array_start
                )
        return steps

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layout.length

    @property
    def capacity(self) -> int:
        """The most positions this cache will hold."""
        return self.config.capacity

    @property
    def rewind_floor(self) -> int:
        """The lowest position, other than 0, that `rewind` can reach now."""
        return self.layout.rewind_floor

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the rows that hold a remembered position."""
        return sum(
            layer.nbytes // layer.rows * layer.rows_held for layer in self.layers if layer.rows
        )

    @property
    def state(self) -> list[mx.array]:
        """Every array that is alive in the cache, for `mx.eval`."""
        arrays = [array for layer in self.layers for array in (layer.keys, layer.values)]
        return [array for array in arrays if array is not None]

    def layer(self, index: int) -> SequenceLayer:
        """The object of one cache layer. Raises `LayerIndexError`."""
        if isinstance(index, bool) or not isinstance(index, int):
            raise LayerIndexError(f"a cache layer index is an integer, got {index!r}")
        if not 0 <= index < len(self.layers):
            raise LayerIndexError(
                f"cache layer {index} does not exist; there are {len(self.layers)}, counted from 0"
            )
        return self.layers[index]

    def update_and_fetch(
        self, layer: int, keys: mx.array, values: mx.array, position: int | None = None
    ) -> tuple[mx.array, mx.array]:
        """Append new rows to one layer and answer the rows that its queries may see.

        keys [B, H, T, key_dim], values [B, H, T, value_dim]. `position`, when given, must be
        where the layer stands. Raises a typed error, and changes nothing, when the layer, the
        shapes, the dtype or the position do not fit, or the capacity would be exceeded.
        """
        cache_layer = self.layer(layer)
        if position is not None and position != cache_layer.offset:
            raise PositionError(
                f"position {position!r} does not continue cache layer {layer}, whose next "
                f"position is {cache_layer.offset}; rewind first, or leave the position out"
            )
        return cache_layer.update_and_fetch(keys, values)

    def make_mask(
        self, layer: int, count: int, window: int | None = None, return_array: bool = False
    ) -> Mask:
        """The mask of the next `count` tokens for one layer; ask before `update_and_fetch`.

        None, "causal" or a bool array [T, S]. Layers of one policy may share it.
        """
        return self.layer(layer).make_mask(count, return_array, window)

    def can_extend(self, count: int = 1) -> bool:
        """Whether `count` more positions fit into the capacity."""
        return self.layout.can_extend(count)

    def reserve(self, length: int) -> None:
        """Grow once, now, so that `length` positions need no further growth.

        Raises `CapacityError`, and changes nothing, when `length` exceeds the capacity.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise CapacityError(f"a reservation needs a number of positions >= 0, got {length!r}")
        if length > self.capacity:
            raise CapacityError(
                f"cannot reserve {length} positions: the capacity is {self.capacity}; "
                "make the cache with a larger capacity"
            )
        for step in self._steps.values():
            step.reserve(length)
        for layer in self.layers:
            layer.grow(self._steps[layer.geometry.policy].rows)

    def rewind(self, position: int) -> None:
        """Forget every position from `position` on, in all layers.

        Also puts right a step that was interrupted half-way: some layers had written it, others
        had not. Raises `RewindError`, and changes nothing, for a position that some layer does
        not hold, or whose window a ring has overwritten.
        """
        self.layout.check_rewind(position)
        shortest = min(layer.offset for layer in self.layers)
        if position > shortest:
            raise RewindError(
                f"cannot rewind to {position}: a step was interrupted and some layers hold only "
                f"{shortest} positions; rewind to {shortest} or less, or clear the cache"
            )
        self.layout.rewind(position)
        self._settle(position)

    def clear(self) -> None:
        """Forget every position; the allocated rows stay for the next sequence."""
        self.layout.clear()
        self._settle(0)

    def _settle(self, length: int) -> None:
        for layer in self.layers:
            layer.settle(length)
