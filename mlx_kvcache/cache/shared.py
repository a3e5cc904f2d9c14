"""What the caches of many sequences have in common: a step is declared, written and attended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import mlx.core as mx

from mlx_kvcache.cache.attend import AttendSpec, attend_unchecked, check_options
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.errors import (
    AttentionError,
    LayerIndexError,
    StepError,
    UpdateDtypeError,
    UpdateShapeError,
)
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.layout.shared import SharedLayout
from mlx_kvcache.layout.steps import DeclaredStep, SpanRequest

LayoutType = TypeVar("LayoutType", bound=SharedLayout)
#: What a cache answers one layer's step with, before it is attended.
RowsType = TypeVar("RowsType")


class AttendOptions(NamedTuple):
    """How queries are attended, whatever the rows are."""

    scale: float
    sinks: mx.array | None = None
    softcap: float | None = None
    out_dtype: mx.Dtype | None = None


class MLXSharedCache(ABC, Generic[LayoutType, RowsType]):
    """The keys and values of many sequences, and a step that runs over some of them at once.

    A step is flat: [1, H, T, D], the tokens of its sequences one after the other, without
    padding. `declare_step` admits it; then every layer calls `attend` (or `make_mask` and
    `update_and_fetch`) with its new rows; then the step is over.

    Every refused call raises a typed error and changes nothing.
    """

    #: Whether forks share rows, which `defragment` then moves together.
    shares_rows: ClassVar[bool] = False

    def __init__(self, geometry: CacheGeometry, config: CacheConfig | None) -> None:
        config = CacheConfig() if config is None else config
        validate(geometry, config)
        self.geometry = geometry
        self.config = config
        self.layout: LayoutType = self._make_layout()
        self._step: DeclaredStep | None = None
        self._unwritten: set[int] = set()
        self._positions: tuple[DeclaredStep, mx.array] | None = None

    @abstractmethod
    def _make_layout(self) -> LayoutType:
        """The layout that keeps the sequences apart."""

    @abstractmethod
    def _begin_step(self, step: DeclaredStep) -> None:
        """Prepare what the layers of a step that was just placed will share."""

    @abstractmethod
    def _end_step(self) -> None:
        """Drop what the layers of the newest step shared: a verb has changed the sequences."""

    @abstractmethod
    def _check_single_answer(self, step: DeclaredStep) -> None:
        """Raise `StepError` when the step has no single answer for all of its tokens."""

    @abstractmethod
    def _write(self, layer: int, keys: mx.array, values: mx.array) -> RowsType:
        """Write the rows of the running step, which were checked, and answer what is visible."""

    @abstractmethod
    def _rows(self, layer: int, dtypes: tuple[mx.Dtype, mx.Dtype]) -> RowsType:
        """What a layer that has written the running step is answered with."""

    @abstractmethod
    def _attend(
        self, layer: int, rows: RowsType, queries: mx.array, options: AttendOptions
    ) -> mx.array:
        """Attend the queries of the running step to the rows of a layer."""

    @abstractmethod
    def _single(self, rows: RowsType) -> tuple[mx.array, mx.array]:
        """The keys and values of a step that has a single answer."""

    @abstractmethod
    def _mask(self, layer: int) -> Mask:
        """The mask that fits the rows of a step that has a single answer."""

    @abstractmethod
    def new(self) -> int:
        """Begin an empty sequence and answer its id, the lowest that is not in use."""

    @abstractmethod
    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence with the same history, up to a position, and answer its id."""

    @abstractmethod
    def remove(self, sequence: int) -> None:
        """Forget a sequence. Raises `UnknownSequenceError`."""

    @abstractmethod
    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on."""

    @property
    @abstractmethod
    def state(self) -> list[mx.array]:
        """Every array that is alive in the cache, for `mx.eval`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def capacity(self) -> int:
        """The most positions that all sequences may hold together."""
        return self.layout.capacity

    @property
    def used(self) -> int:
        """How much of the capacity is taken."""
        return self.layout.used

    @property
    def free(self) -> int:
        """How many more tokens fit."""
        return self.layout.free

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of the live sequences, ascending."""
        return self.layout.sequences

    @property
    def unfinished(self) -> Mapping[int, int]:
        """The sequences whose newest step some layers have not written, and where it started."""
        return self.layout.unfinished

    def position(self, sequence: int) -> int:
        """Positions that a sequence holds: its next token's. Raises `UnknownSequenceError`."""
        return self.layout.position(sequence)

    def declare_step(
        self, request: SpanRequest, positions: Sequence[int] | None = None
    ) -> DeclaredStep:
        """Admit the next step: (sequence id, number of tokens) for each span, in token order.

        A sequence may have several spans, which continue each other. The answer holds the
        position of each token, and the index of each sequence's last one. Raises `StepError`,
        `UnknownSequenceError`, `CapacityError` or `PositionError`; an earlier declaration then
        stands.
        """
        return self.layout.declare_step(request, positions)

    def step_positions(self) -> mx.array:
        """The positions int32 [T] of the step that is declared or running, for rotary embeddings.

        Raises `StepError` when there is none.
        """
        step = self.layout.next_placement()
        if self._positions is None or self._positions[0] is not step:
            self._positions = step, mx.array(step.positions, mx.int32)
        return self._positions[1]

    def abandon_step(self) -> None:
        """Take back the step that is declared or was not finished.

        Its sequences stand where they stood before it. Raises `RewindError`, and changes
        nothing, when a ring of one of them has overwritten what it would need; remove that
        sequence, and abandon again.
        """
        unfinished = self.layout.unfinished
        for sequence, start in unfinished.items():
            self.layout.check_rewind(sequence, start)
        self.layout.retract_declaration()
        for sequence, start in unfinished.items():
            self.rewind(sequence, start)

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
        positions: Sequence[int] | None = None,
    ) -> mx.array:
        """Write the new rows of the declared step into a layer, and attend to what each sees.

        queries [1, Hq, T, key_dim], keys [1, H, T, key_dim] and values [1, H, T, value_dim] with
        the tokens in the declared order, already rotated; Hq a multiple of H. The answer is
        [1, Hq, T, value_dim] in `out_dtype`, or in the dtype of the queries. sinks [Hq] and
        softcap as in `mlx_kvcache.attend`.

        A layer that is asked again within the step is not written again: layers that share keys
        and values do that. It must be marked `shared` in the geometry, or give `positions`, so
        that a forgotten declaration is told apart.

        Raises `LayerIndexError`, `StepError`, `PositionError`, `UpdateShapeError`,
        `UpdateDtypeError` or `AttentionError`, and then changes nothing.
        """
        step = self._check_update(layer, keys, values, positions)
        options = AttendOptions(scale, sinks, softcap, out_dtype)
        self._check_queries(layer, queries, step.tokens, options)
        rows = self._updated(layer, keys, values, step)
        return self._attend(layer, rows, queries, options)

    def attend_again(
        self,
        layer: int,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        *,
        softcap: float | None = None,
        out_dtype: mx.Dtype | None = None,
    ) -> mx.array:
        """Attend other queries of the running step to a layer that has written it already.

        For model layers that read another layer's keys and values and have none of their own.
        Raises `StepError` when the layer has not written the running step.
        """
        step = self._written_step(layer)
        options = AttendOptions(scale, sinks, softcap, out_dtype)
        self._check_queries(layer, queries, step.tokens, options)
        rows = self._rows(layer, (queries.dtype, queries.dtype))
        return self._attend(layer, rows, queries, options)

    def update_and_fetch(
        self,
        layer: int,
        keys: mx.array,
        values: mx.array,
        positions: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Write the new rows of the declared step into a layer, and answer those it may see.

        They fit the mask of `make_mask`, and come back in the caller's dtype. Raises as `attend`
        does, and `StepError` for a step whose sequences are answered one by one.
        """
        step = self._check_update(layer, keys, values, positions)
        self._check_single_answer(step)
        return self._single(self._updated(layer, keys, values, step))

    def make_mask(self, layer: int) -> Mask:
        """The mask of the declared step for the rows that `update_and_fetch` answers with.

        None, "causal" (lower-right aligned) or bool [T, S]. Places the step. Raises
        `LayerIndexError`, or `StepError` when no step is declared or it has no single answer.
        """
        self._check_layer(layer)
        step = self.layout.next_placement()
        self._check_single_answer(step)
        self._open(step)
        return self._mask(layer)

    def _updated(
        self, layer: int, keys: mx.array, values: mx.array, step: DeclaredStep
    ) -> RowsType:
        self._open(step)
        if layer not in self._unwritten:
            return self._rows(layer, (keys.dtype, values.dtype))
        rows = self._write(layer, keys, values)
        self._unwritten.discard(layer)
        if not self._unwritten:
            self.layout.finish_step()
        return rows

    def _open(self, step: DeclaredStep) -> None:
        if step is self._step and step is self.layout.placed:
            return
        self.layout.place_step()
        self._begin_step(step)
        self._unwritten = set(range(len(self.geometry.layers)))
        # Last, so that a step whose beginning was interrupted begins again.
        self._step = step

    def _written_step(self, layer: int) -> DeclaredStep:
        self._check_layer(layer)
        step = self.layout.placed
        if step is None or step is not self._step or layer in self._unwritten:
            raise StepError(
                f"cache layer {layer} has not written the running step, so there is nothing to "
                "attend to again; call attend with its keys and values first"
            )
        return step

    def _check_layer(self, layer: int) -> None:
        count = len(self.geometry.layers)
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise LayerIndexError(
                f"cache layer {layer!r} does not exist; there are {count}, counted from 0"
            )

    def _check_update(
        self, layer: int, keys: mx.array, values: mx.array, positions: Sequence[int] | None
    ) -> DeclaredStep:
        self._check_layer(layer)
        step = self.layout.next_placement(positions)
        geometry = self.geometry.layers[layer]
        heads, tokens = geometry.kv_heads, step.tokens
        if keys.shape != (1, heads, tokens, geometry.key_dim) or values.shape != (
            1,
            heads,
            tokens,
            geometry.value_dim,
        ):
            raise UpdateShapeError(
                f"cache layer {layer} takes keys [1, {heads}, {tokens}, {geometry.key_dim}] and "
                f"values [1, {heads}, {tokens}, {geometry.value_dim}] in this step of {tokens} "
                f"tokens, got {list(keys.shape)} and {list(values.shape)}"
            )
        for name, array in (("keys", keys), ("values", values)):
            if not mx.issubdtype(array.dtype, mx.floating):
                raise UpdateDtypeError(
                    f"cache layer {layer} takes floating-point {name}, got {array.dtype}; "
                    "cast them first"
                )
        repeated = step is self.layout.placed and step is self._step
        if repeated and layer not in self._unwritten and positions is None and not geometry.shared:
            raise StepError(
                f"cache layer {layer} has already written this step; declare the next one. If "
                "several model layers share it, say so in LayerGeometry.shared, or give positions"
            )
        return step

    def _check_queries(
        self, layer: int, queries: mx.array, tokens: int, options: AttendOptions
    ) -> None:
        geometry = self.geometry.layers[layer]
        shape = queries.shape
        if (
            len(shape) != 4
            or (shape[0], shape[2], shape[3]) != (1, tokens, geometry.key_dim)
            or shape[1] < 1
            or shape[1] % geometry.kv_heads
        ):
            raise AttentionError(
                f"cache layer {layer} is attended by queries [1, n * {geometry.kv_heads}, "
                f"{tokens}, {geometry.key_dim}] in this step, got {list(shape)}"
            )
        if not mx.issubdtype(queries.dtype, mx.floating):
            raise AttentionError(f"queries must be floating-point, got {queries.dtype}")
        if not geometry.value_dim:
            raise AttentionError(f"cache layer {layer} keeps no values to attend to")
        check_options(shape[1], options.scale, options.out_dtype, options.sinks, options.softcap)


def attend_rows(
    queries: mx.array, keys: mx.array, values: mx.array, mask: Mask, options: AttendOptions
) -> mx.array:
    """Attention of queries [1, Hq, T, D] to rows [1, H, S, D], none of them blind."""
    spec = AttendSpec.from_mask(mask)
    scale, sinks, softcap, out_dtype = options
    return attend_unchecked(queries, keys, values, spec, scale, out_dtype, sinks, softcap)
