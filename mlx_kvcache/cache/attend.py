"""The seam between attention and a cache: write a step, attend to what each query sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from mlx_kvcache.cache.arguments import AttendOptions, Positions, check_options, positions_of
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.errors import (
    AttentionError,
    LayerIndexError,
    MemoryLimitError,
    StepError,
    UpdateDtypeError,
    UpdateShapeError,
)
from mlx_kvcache.facts.checks import shortened
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.layout.shared import SharedLayout
from mlx_kvcache.layout.steps import DeclaredStep, SpanRequest
from mlx_kvcache.store.rows import KeysValues, RowView
from mlx_kvcache.store.traces import refuse_traced


class RunningStep(Protocol):
    """A placed step, made once and shared by the layers, of which `unwritten` are yet to write."""

    step: DeclaredStep
    unwritten: set[int]


Layout = TypeVar("Layout", bound=SharedLayout[Any])
Running = TypeVar("Running", bound=RunningStep)


def attend_view(queries: mx.array, view: RowView, mask: Mask, options: AttendOptions) -> mx.array:
    """Attention of queries [B, Hq, T, D] to the rows of a view, of which every query sees one.

    The one place that decides how rows are read. Computed in the dtype of the queries with a
    float32 softmax; answers [B, Hq, T, value_dim] in `options.out_dtype`.
    """
    keys, values = view.dense()
    scale, sinks, softcap, out_dtype = options
    dtype = queries.dtype
    if keys.dtype != dtype:
        keys = keys.astype(dtype)
    if values.dtype != dtype:
        values = values.astype(dtype)
    if sinks is not None:
        sinks = sinks.astype(dtype)
    if softcap is None:
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=float(scale), mask=mask, sinks=sinks
        )
    else:
        out = _capped(queries, keys, values, mask, float(scale), sinks, float(softcap))
    return out if out_dtype is None else out.astype(out_dtype)


def _capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    scale: float,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """Attention with capped scores, which MLX's fused attention does not offer."""
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    grouped = (queries * scale).reshape(batch, heads, query_heads // heads, tokens, dim)
    scores = (grouped @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
    scores = (softcap * mx.tanh(scores / softcap)).reshape(batch, query_heads, tokens, rows)
    if isinstance(mask, str):
        mask = mx.arange(rows)[None] <= mx.arange(tokens)[:, None] + (rows - tokens)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :rows].astype(queries.dtype)
    weights = weights.reshape(batch, heads, query_heads // heads, tokens, rows)
    return (weights @ values[:, :, None]).reshape(batch, query_heads, tokens, values.shape[3])


class SharedAttention(ABC, Generic[Layout, Running]):
    """The seam of a cache of many sequences: the layers of a declared step, one after the other.

    A step is flat: [1, H, T, D], the tokens of its sequences one after the other, without
    padding. `declare_step` admits it; then every layer calls `attend` (or `make_mask` and
    `update_and_fetch`) with its new rows; then the step is over.
    """

    layout: Layout

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        # Dropped by every verb and declaration: it must not keep rows or masks alive.
        self._running: Running | None = None
        self._positions: tuple[DeclaredStep, mx.array] | None = None
        # What an interrupted verb has left to do. It may be done again, also from half-way.
        self._pending: Callable[[], None] | None = None

    @abstractmethod
    def _begin_step(self, step: DeclaredStep, rows: KeysValues | None) -> Running:
        """Make what the layers of a step that was just placed will share.

        rows: the first that will be written, where they are known. Raises `MemoryLimitError`.
        """

    @abstractmethod
    def _check_single_answer(self, step: DeclaredStep) -> None:
        """Raise `StepError` when the step has no single answer for all of its tokens."""

    @abstractmethod
    def _write(self, running: Running, layer: int, keys: mx.array, values: mx.array) -> None:
        """Write the rows of the running step, which were checked."""

    @abstractmethod
    def _attend(
        self, running: Running, layer: int, queries: mx.array, options: AttendOptions
    ) -> mx.array:
        """Attend the queries of the running step to the rows of a layer that has written it."""

    @abstractmethod
    def _single_answer(self, running: Running, layer: int) -> KeysValues:
        """The keys and values that a layer answers a step with that has a single answer."""

    @abstractmethod
    def _mask(self, running: Running, layer: int) -> Mask:
        """The mask that fits them."""

    def declare_step(
        self, request: SpanRequest, positions: Sequence[int] | None = None
    ) -> DeclaredStep:
        """Admit the next step: (sequence id, number of tokens) for each span, in token order.

        A sequence may have several spans, which continue each other. The answer holds the
        position of each token, and the index of each sequence's last one. Raises `StepError`,
        `UnknownSequenceError`, `CapacityError` or `PositionError`; an earlier declaration then
        stands.
        """
        if self._pending is not None:
            self._pending()
        step = self.layout.declare_step(request, positions)
        self._running = None
        return step

    def step_positions(self) -> mx.array:
        """The positions int32 [T] of the step that is declared or running, for rotary embeddings.

        Raises `StepError` when there is none.
        """
        if self._pending is not None:
            self._pending()
        step = self.layout.next_placement()
        if self._positions is None or self._positions[0] is not step:
            self._positions = step, mx.array(step.positions, mx.int32)
        return self._positions[1]

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
        """Write the new rows of the declared step into a layer, and attend to what each sees.

        queries [1, Hq, T, key_dim], keys [1, H, T, key_dim] and values [1, H, T, value_dim] with
        the tokens in the declared order, already rotated; Hq a multiple of H. The answer is
        [1, Hq, T, value_dim] in `out_dtype`, or in the dtype of the queries. sinks [Hq] and
        softcap as in `mlx_kvcache.attend`.

        A layer that is asked again within the step is not written again: layers that share keys
        and values do that. It must be marked `shared` in the geometry, or give `positions`, so
        that a forgotten declaration is told apart.

        Raises `LayerIndexError`, `StepError`, `PositionError`, `UpdateShapeError`,
        `UpdateDtypeError`, `AttentionError`, or `MemoryLimitError` when the rows take more memory
        than can be had, and then changes nothing: the declaration stands.
        """
        step = self._check_update(layer, keys, values, positions)
        options = AttendOptions(scale, sinks, softcap, out_dtype)
        self._check_queries(layer, queries, step.tokens, options)
        running = self._update(layer, keys, values, step)
        answer = self._attend(running, layer, queries, options)
        # After the answer: a step whose last answer was lost by an interruption is not finished.
        if not running.unwritten:
            self.layout.finish_step()
        return answer

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
        self._check_layer(layer)
        running = self._running
        if (
            running is None
            or running.step is not self.layout.now.placed
            or layer in running.unwritten
        ):
            raise StepError(
                f"cache layer {layer} has not written the running step, so there is nothing to "
                "attend to again; call attend with its keys and values first"
            )
        options = AttendOptions(scale, sinks, softcap, out_dtype)
        self._check_queries(layer, queries, running.step.tokens, options)
        return self._attend(running, layer, queries, options)

    def update_and_fetch(
        self,
        layer: int,
        keys: mx.array,
        values: mx.array,
        positions: Positions | None = None,
    ) -> KeysValues:
        """Write the new rows of the declared step into a layer, and answer those it may see.

        They fit the mask of `make_mask`, and come back in the caller's dtype. Raises as `attend`
        does, and `StepError` for a step whose sequences are answered one by one.
        """
        step = self._check_update(layer, keys, values, positions)
        self._check_single_answer(step)
        running = self._update(layer, keys, values, step)
        held_keys, held_values = self._single_answer(running, layer)
        answer = held_keys.astype(keys.dtype), held_values.astype(values.dtype)
        if not running.unwritten:
            self.layout.finish_step()
        return answer

    def make_mask(self, layer: int) -> Mask:
        """The mask of the declared step for the rows that `update_and_fetch` answers with.

        None, "causal" (lower-right aligned) or bool [T, S]. Places the step. Raises
        `LayerIndexError`, `MemoryLimitError`, or `StepError` when no step is declared or it has
        no single answer.
        """
        self._check_layer(layer)
        if self._pending is not None:
            self._pending()
        step = self.layout.next_placement()
        self._check_single_answer(step)
        return self._mask(self._open(step, None), layer)

    def _update(self, layer: int, keys: mx.array, values: mx.array, step: DeclaredStep) -> Running:
        running = self._running
        if running is None or len(running.unwritten) == len(self.geometry.layers):
            refuse_traced(keys)
        if running is None or running.step is not step:
            running = self._open(step, (keys, values))
        if layer in running.unwritten:
            self._write(running, layer, keys, values)
            running.unwritten.discard(layer)
        return running

    def _open(self, step: DeclaredStep, rows: KeysValues | None) -> Running:
        running = self._running
        if running is None or running.step is not step:
            before = self.layout.now
            self.layout.place_step()
            try:
                # Last, so that a step whose beginning was interrupted begins again.
                running = self._running = self._begin_step(step, rows)
            except MemoryLimitError:
                self.layout.stand(before)
                raise
        return running

    def _check_layer(self, layer: int) -> None:
        count = len(self.geometry.layers)
        if type(layer) is not int or not 0 <= layer < count:
            raise LayerIndexError(
                f"cache layer {shortened(layer)} does not exist; there are {count}, counted from 0"
            )

    def _check_update(
        self, layer: int, keys: mx.array, values: mx.array, positions: Positions | None
    ) -> DeclaredStep:
        self._check_layer(layer)
        if self._pending is not None:
            self._pending()
        step = self.layout.now.placed or self.layout.next_placement()
        if positions is not None:
            self.layout.check_positions(step, positions_of(positions, step.tokens))
        geometry = self.geometry.layers[layer]
        heads, tokens = geometry.kv_heads, step.tokens
        for name, array in (("keys", keys), ("values", values)):
            if not isinstance(array, mx.array):
                raise UpdateDtypeError(
                    f"cache layer {layer} takes {name} as an mlx array, got "
                    f"{type(array).__name__}; wrap it in mx.array first"
                )
            if not mx.issubdtype(array.dtype, mx.floating):
                raise UpdateDtypeError(
                    f"cache layer {layer} takes floating-point {name}, got {array.dtype}; "
                    "cast them first"
                )
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
        running = self._running
        if (
            running is not None
            and running.step is step
            and layer not in running.unwritten
            and positions is None
            and not geometry.shared
        ):
            raise StepError(
                f"cache layer {layer} has already written this step; declare the next one. If "
                "several model layers share it, say so in LayerGeometry.shared, or give positions"
            )
        return step

    def _check_queries(
        self, layer: int, queries: mx.array, tokens: int, options: AttendOptions
    ) -> None:
        geometry = self.geometry.layers[layer]
        if not isinstance(queries, mx.array):
            raise UpdateDtypeError(f"queries must be an mx.array, got {type(queries).__name__}")
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
        # By far the usual options need no call to be found right.
        scale, sinks, softcap, out_dtype = options
        plain = sinks is None and softcap is None and out_dtype is None
        if not plain or type(scale) is not float or not isfinite(scale):
            check_options(shape[1], options)
