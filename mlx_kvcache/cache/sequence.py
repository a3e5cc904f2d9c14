"""MLXSequenceCache: the keys and values of one sequence, or of a batch that advances together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from mlx_kvcache.cache.arguments import (
    AttendOptions,
    Positions,
    check_arrays,
    check_options,
    step_start,
)
from mlx_kvcache.cache.attend import attend_view
from mlx_kvcache.cache.growth import RowForm, SequenceGrowth
from mlx_kvcache.cache.kept import put_back
from mlx_kvcache.cache.layer import LayerState, SequenceLayer
from mlx_kvcache.cache.snapshot import Snapshot, check_fits
from mlx_kvcache.cache.step import PolicySteps
from mlx_kvcache.errors import CapacityError, LayerIndexError, PositionError, UpdateShapeError
from mlx_kvcache.facts.checks import is_integer
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.choice import prefers_array_start

KIND = "sequence"


class SequenceState(NamedTuple):
    """What a sequence cache holds: where the sequence stands, and the rows of each layer."""

    length: int
    high_water: int
    layers: tuple[LayerState, ...]


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
        by_layer = [self._steps[policy] for policy in policies]
        self.growth = SequenceGrowth(geometry.layers, by_layer, self.layout)
        self._layer_class = layer_class
        dtype = None if config.kv_dtype is None else getattr(mx, config.kv_dtype)
        self.layers = tuple(
            layer_class(index, layer, self.layout, by_layer[index], self.growth, dtype)
            for index, layer in enumerate(geometry.layers)
        )

    def _make_steps(self, policies: list[LayerPolicy]) -> dict[LayerPolicy, PolicySteps]:
        array_start = prefers_array_start(self.geometry, self.config)
        steps: dict[LayerPolicy, PolicySteps] = {}
        for index, policy in enumerate(policies):
            if policy not in steps:
                steps[policy] = PolicySteps(
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
    def form(self) -> RowForm | None:
        """The form of the rows that are allocated, None where none are."""
        return next((layer.form for layer in self.layers if layer.rows), None)

    @property
    def state(self) -> list[mx.array]:
        """Every array that is alive in the cache, for `mx.eval`."""
        return [array for layer in self.layers for array in layer.store.state]

    def layer(self, index: int) -> SequenceLayer:
        """The object of one cache layer. Raises `LayerIndexError`."""
        if not is_integer(index, 0, len(self.layers) - 1):
            raise LayerIndexError(
                f"cache layer {index!r} does not exist; there are {len(self.layers)}, counted "
                "from 0"
            )
        return self.layers[index]

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        *,
        softcap: float | None = None,
        out_dtype: mx.Dtype | None = None,
        positions: Positions | None = None,
    ) -> mx.array:
        """Write a step of T tokens to one layer and attend to all that its queries may see.

        queries [B, Hq, T, key_dim], keys [B, H, T, key_dim] and values [B, H, T, value_dim],
        rotated already; Hq a multiple of H. Answers [B, Hq, T, value_dim] in `out_dtype`, or in
        the queries' dtype, in which it is computed whatever dtype is stored. sinks [Hq] and
        softcap as in `mlx_kvcache.attend`.

        positions: None continues the layer; else where the step starts, or the position of each
        token, one run. The step that the layer has just written may be given once more: a model
        layer that shares another's keys and values does that. Then nothing is written, and the
        rows that the first call read are read again.

        Raises `LayerIndexError`, `UpdateShapeError`, `UpdateDtypeError`, `AttentionError`,
        `PositionError`, `CapacityError`, or `GeometryError` where a layer that is not marked
        shared is asked again after a step larger than its spare rows; then nothing has changed.
        """
        target = self.layer(layer)
        options = AttendOptions(scale, sinks, softcap, out_dtype)
        check_arrays(queries, keys, values)
        check_options(queries.shape[1], options)
        _check_tokens(target, queries, keys, values)
        tokens = queries.shape[2]
        position = target.offset if positions is None else step_start(positions, tokens)
        if position == target.offset:
            # What refuses the write comes first: a mask settles the order of the rows.
            target.check(keys, values)
            self.layout.admit(position, tokens)
            mask = target.mask_at(position, tokens)
            view = target.write(keys, values)
        elif target.wrote_last(position, tokens):
            view = target.read_again()
            _check_batch(target, queries, view.keys)
            mask = target.mask_at(position, tokens)
        else:
            raise PositionError(
                f"{tokens} tokens at position {position} do not continue cache layer {layer}, "
                f"whose next position is {target.offset}, nor are they the step it has just "
                f"written; continue at {target.offset}, or rewind the cache first"
            )
        return attend_view(queries, view, mask, options)

    def can_extend(self, count: int = 1) -> bool:
        """Whether `count` more positions fit into the capacity."""
        return self.layout.can_extend(count)

    def reserve(self, length: int) -> None:
        """Grow once, now, so that `length` positions need no further growth.

        Raises `CapacityError`, and changes nothing, when `length` exceeds the capacity, and
        `MemoryLimitError` when its rows take more memory than can be had.
        """
        if not is_integer(length, 0):
            raise CapacityError(f"a reservation needs a number of positions >= 0, got {length!r}")
        if length > self.capacity:
            raise CapacityError(
                f"cannot reserve {length} positions: the capacity is {self.capacity}; "
                "make the cache with a larger capacity"
            )
        held = self.form
        self.growth.reserve(length, held or RowForm.least(self.config.kv_dtype), held)
        for layer in self.layers:
            layer.grow(self._steps[layer.geometry.policy].rows)

    def rewind(self, position: int) -> None:
        """Forget every position from `position` on, in all layers.

        Also puts right a step that was interrupted half-way: some layers had written it, others
        had not. Its start can always be reached: what rings overwrite beyond their spare rows is
        kept until the step is done. Raises `RewindError`, and changes nothing, for a position that
        some layer does not hold, or whose window a ring has overwritten.
        """
        layout = self.layout
        if not (layout.kept and layout.unwritten and position):
            layout.rewind(position)
            self._settle(position)
            return
        layout.begin_rewind(position)
        put_back(layout)
        self._settle(position)
        layout.end_rewind()

    def clear(self) -> None:
        """Forget every position; the allocated rows stay for the next sequence."""
        self.layout.clear()
        self._settle(0)

    def snapshot(self) -> Snapshot[SequenceState]:
        """What the cache holds now, to be put back by `restore`; copies nothing until a write.

        Raises `PositionError` while a step is unfinished.
        """
        self.layout.check_settled()
        mx.eval(self.state)
        held = SequenceState(
            self.length, self.layout.high_water, tuple(layer.hold() for layer in self.layers)
        )
        return Snapshot(KIND, self.geometry, self.config, held, tuple(self.state))

    def restore(self, snapshot: Snapshot[SequenceState]) -> None:
        """Hold what a cache of the same geometry and config held when the snapshot was taken.

        Raises `SnapshotError`, and changes nothing, for a snapshot of another cache.
        """
        check_fits(snapshot, KIND, self.geometry, self.config)
        length, high_water, layers = snapshot.held
        # To the end of this, an interrupt leaves a cache that takes no step.
        self.layout.distrust()
        for steps in self._steps.values():
            steps.forget()
        rows: dict[LayerPolicy, dict[int, int]] = {policy: {} for policy in self._steps}
        for layer, state in zip(self.layers, layers, strict=True):
            layer.restore(state, length)
            if layer.rows:
                rows[layer.geometry.policy][layer.index] = layer.rows
        for policy, steps in self._steps.items():
            steps.restore(rows[policy])
        self.layout.restore(length, high_water)
        if length:
            self.growth.note_room()

    def fork(self, up_to: int | None = None) -> MLXSequenceCache:
        """A cache that holds the same, up to a position; rows are copied when one is written.

        Raises `PositionError` while a step is unfinished, and what `rewind` raises.
        """
        twin = type(self)(self.geometry, self.config, self._layer_class)
        twin.restore(self.snapshot())
        if up_to is not None:
            twin.rewind(up_to)
        return twin

    def _settle(self, length: int) -> None:
        for layer in self.layers:
            layer.settle(length)


def restore_rings(
    cache: MLXSequenceCache, position: int, high_water: int, rings: Mapping[int, LayerState]
) -> None:
    """Put a sequence back to where its rings held these rows, by layer. May be repeated.

    The other layers still have their rows below `position`.
    """
    layers = tuple(rings.get(layer.index) or layer.hold() for layer in cache.layers)
    held = SequenceState(position, high_water, layers)
    cache.restore(Snapshot(KIND, cache.geometry, cache.config, held, ()))


def _check_tokens(
    layer: SequenceLayer, queries: mx.array, keys: mx.array, values: mx.array
) -> None:
    """Hold keys and values against the layer: a repeated step is not written, nor checked there."""
    batch, _, tokens, _ = queries.shape
    facts = layer.geometry
    heads, key_dim, value_dim = facts.kv_heads, facts.key_dim, facts.value_dim
    if keys.shape[1:] != (heads, tokens, key_dim) or values.shape[3] != value_dim:
        raise UpdateShapeError(
            f"cache layer {layer.index} takes, with queries {list(queries.shape)}, keys "
            f"[{batch}, {heads}, {tokens}, {key_dim}] and values [{batch}, {heads}, {tokens}, "
            f"{value_dim}], got {list(keys.shape)} and {list(values.shape)}"
        )


def _check_batch(layer: SequenceLayer, queries: mx.array, keys: mx.array) -> None:
    if keys.shape[0] != queries.shape[0]:
        raise UpdateShapeError(
            f"cache layer {layer.index} has just written this step for a batch of "
            f"{keys.shape[0]}, got queries of a batch of {queries.shape[0]}"
        )
