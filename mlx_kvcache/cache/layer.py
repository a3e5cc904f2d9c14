"""One layer of a sequence cache: validates an update, writes it, answers with the visible rows."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.core import slice_update, split

from mlx_kvcache.cache.growth import RowForm, SequenceGrowth
from mlx_kvcache.cache.kept import keep, put_back
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.step import PolicySteps
from mlx_kvcache.errors import GeometryError, UpdateDtypeError, UpdateShapeError
from mlx_kvcache.facts.geometry import LayerGeometry
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.ops import ROW_AXIS
from mlx_kvcache.store.rows import DenseRows, KeysValues, Placement, RowStore, RowView
from mlx_kvcache.store.traces import refuse_traced


class LayerState(NamedTuple):
    """What a layer holds at rest: its rows, and the dtypes of the newest update."""

    rows: RowStore
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype


class SequenceLayer:
    """One cache layer: its rows, and where it stands.

    `offset` is the position of the next token of this layer: a plain attribute, since models
    read it for every layer of every step. It is ahead of the sequence's other layers by the step
    that runs, and by nothing else.
    """

    __slots__ = (
        "_growth",
        "_key_dtype",
        "_key_shape",
        "_storage_dtype",
        "_value_dtype",
        "_value_shape",
        "geometry",
        "index",
        "offset",
        "sequence",
        "steps",
        "store",
    )

    #: Whether the window that a model names when it asks for a mask narrows the layer's own.
    heeds_model_window = True

    def __init__(
        self,
        index: int,
        geometry: LayerGeometry,
        sequence: SequenceLayout,
        steps: PolicySteps,
        growth: SequenceGrowth,
        storage_dtype: mx.Dtype | None,
    ) -> None:
        self.index = index
        self.geometry = geometry
        self.offset = 0
        self.steps = steps
        self._growth = growth
        self.store: RowStore = DenseRows()
        self.sequence = sequence
        self._storage_dtype = storage_dtype
        # What the newest update that passed every check was given. The shapes are those of one
        # new row, and None where a row must be cast on its way in and out.
        self._key_shape: tuple[int, ...] | None = None
        self._value_shape: tuple[int, ...] | None = None
        self._key_dtype = mx.float32
        self._value_dtype = mx.float32

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceLayer:
        # Arrays are values, which both may hold; unevaluated ones would belong to this thread.
        mx.eval(self.store.state)
        twin = memo[id(self)] = copy.copy(self)
        twin.sequence = copy.deepcopy(self.sequence, memo)
        twin.steps = copy.deepcopy(self.steps, memo)
        twin._growth = copy.deepcopy(self._growth, memo)
        twin.store = copy.deepcopy(self.store, memo)
        return twin

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Append keys [B, H, T, key_dim] and values [B, H, T, value_dim]; answer what is visible.

        The rows come back in the caller's dtype, in logical order, or in the order of the ring's
        slots when `make_mask` was asked for this step and answered a mask for that order. A dtype
        other than before is looked for in the first layer of a step only.
        Raises `UpdateShapeError`, `UpdateDtypeError`, `PositionError` or `CapacityError`, and
        then nothing has changed.
        """
        steps = self.steps
        try:
            if (
                self.offset != steps.row_at
                or keys.shape != self._key_shape
                or values.shape != self._value_shape
            ):
                if not self._opens_decode(keys, values):
                    return self._in_callers_dtype(self._write(keys, values))
                if not steps.array_start:
                    return self._append_at(keys, values)
        except AttributeError:
            # What has no shape is no array.
            self.check(keys, values)
            raise
        # The shapes are known: rows are stored as they are, and the step's is among them.
        store = self.store
        keys = slice_update(store.keys, keys, steps.start, ROW_AXIS)  # type: ignore[arg-type]
        values = slice_update(store.values, values, steps.start, ROW_AXIS)  # type: ignore[arg-type]
        store.keys, store.values = keys, values
        sequence = self.sequence
        # One statement.
        self.offset, sequence.unwritten = steps.end, sequence.unwritten - 1
        stop = steps.stop
        if not stop:
            return keys, values
        # The first of two parts is a view, built faster than a slice.
        return split(keys, (stop,), 2)[0], split(values, (stop,), 2)[0]

    def _append_at(self, keys: mx.array, values: mx.array) -> KeysValues:
        """A decode step whose row the host knows."""
        steps, start = self.steps, self.steps.start
        self.store.write(Placement((Run(self.offset, 1),), (start,)), keys, values)
        sequence = self.sequence
        self.offset, sequence.unwritten = steps.end, sequence.unwritten - 1
        return self.store.read((Run(0, steps.stop or self.store.rows),)).dense()

    def take(self, keys: mx.array, values: mx.array, end: int) -> None:
        """Hold the buffers that a step up to `end`, which has begun, has written elsewhere."""
        store, sequence = self.store, self.sequence
        store.keys, store.values = keys, values
        # One statement.
        self.offset, sequence.unwritten = end, sequence.unwritten - 1

    def write(self, keys: mx.array, values: mx.array) -> RowView:
        """Append rows as `update_and_fetch` does; answer what is visible as it lies.

        Raises as `update_and_fetch` does.
        """
        if self._opens_decode(keys, values):
            return RowView.of(*self.update_and_fetch(keys, values))
        return self._write(keys, values)

    def _opens_decode(self, keys: mx.array, values: mx.array) -> bool:
        """Whether this is a decode step that the short way serves, open by now."""
        return (
            keys.shape == self._key_shape
            and values.shape == self._value_shape
            and keys.dtype == self._key_dtype
            and values.dtype == self._value_dtype
            and (self.offset == self.steps.decode_at or self._begins_decode(keys))
        )

    def _begins_decode(self, keys: mx.array) -> bool:
        refuse_traced(keys)
        return self.steps.open_decode(self.offset)

    def _write(self, keys: mx.array, values: mx.array) -> RowView:
        self.check(keys, values)
        refuse_traced(keys)
        steps, store = self.steps, self.store
        position, tokens = self.offset, keys.shape[2]
        if position + tokens > self.sequence.room:
            self._growth.make_room(position, tokens, self._form_of(keys, values), self.form)
        step = steps.open(position, tokens)
        self._allocate_for(keys, values)
        if step.joined:
            keep(self.sequence, self.index, self)
            view = store.read_before(step.read, keys, values)
            # Aside: the rows of before are kept, and read again if this is interrupted.
            store = store.renewed(view, step.end)
            # Whoever evaluates the answer evaluates the write, which else would be left to a
            # stream of this thread.
            view = view._replace(keys=mx.depends(view.keys, store.state))
            if self.geometry.shared:
                steps.joined[self.index] = view
        else:
            store.write(step.placement, keys, values)
            view = store.read(step.read)
        sequence = self.sequence
        # One statement.
        self.store, self.offset, sequence.unwritten = store, step.end, sequence.unwritten - 1
        if not sequence.unwritten:
            sequence.kept = None
        return view

    def read_again(self) -> RowView:
        """What the newest `write` of this layer answered with, without another.

        Raises `UpdateShapeError` when nothing has been written yet, and `GeometryError` after a
        step larger than the ring's spare rows when the geometry does not mark this layer shared:
        the rows that such a step answered with are kept for shared layers only.
        """
        store, steps = self.store, self.steps
        if not store.rows or self.offset == 0:
            raise UpdateShapeError(
                f"cache layer {self.index} holds no keys and values yet; update it first"
            )
        step = steps.step
        if step is None and steps.decode_at >= 0 and steps.end == self.offset:
            return store.read((Run(0, steps.stop or store.rows),))
        if step is None or step.end != self.offset:
            return store.read(steps.read_runs(self.offset))
        if not step.joined:
            return store.read(step.read)
        if self.index not in steps.joined:
            raise GeometryError(
                f"cache layer {self.index} is read again after a step of {step.tokens} tokens, "
                "more than its spare rows, but its geometry says that no other layer shares it; "
                "set LayerGeometry.shared"
            )
        return steps.joined[self.index]

    def keys_and_values(self) -> KeysValues:
        """The rows that the newest update of this layer answered with. Raises as `read_again`."""
        return self._in_callers_dtype(self.read_again())

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm passes it by this name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Mask:
        """The mask for the next N tokens, to be asked for before they are written.

        None, "causal" (lower-right aligned) or a bool array [N, S] that fits the S rows which
        the next update answers with. `window_size` narrows the layer's own window. Raises
        `PositionError` for what is no number of tokens, `ConfigError` for what is no window.
        """
        window = 0 if window_size is None or not self.heeds_model_window else window_size
        return self.steps.mask(self.offset, N, window, return_array)

    def mask_at(self, position: int, tokens: int) -> Mask:
        """The mask of a step of `tokens` at `position`, be it the next one or the newest one."""
        return self.steps.mask(position, tokens, 0, False)

    def wrote_last(self, position: int, tokens: int) -> bool:
        """Whether the newest update of this layer was the step of `tokens` at `position`.

        `keys_and_values` then answers for that step once more: layers that share this one's keys
        and values ask again with equal positions.
        """
        return self.offset == position + tokens and self.steps.is_running(position, tokens)

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys, which may be replaced by the same rows with a dependency."""
        return self.store.keys

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.store.replace("keys", array)

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values; see `keys`."""
        return self.store.values

    @values.setter
    def values(self, array: mx.array) -> None:
        self.store.replace("values", array)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.store.nbytes

    @property
    def rows(self) -> int:
        """Rows allocated."""
        return self.store.rows

    @property
    def rows_held(self) -> int:
        """Rows that hold a position which is still remembered: all, or a ring's newest."""
        return self.steps.rows_held(self.offset)

    def step_back(self, position: int) -> None:
        """Put this layer at an earlier position, for callers that go through them one by one.

        The first takes the sequence along, and no step begins until the others have followed.
        Raises `RewindError`, and changes nothing, when the position cannot be reached.
        """
        sequence = self.sequence
        if sequence.kept and sequence.unwritten and position:
            if not sequence.is_overwritten:
                # A rewind was interrupted, or no row is needed that was overwritten.
                sequence.check_rewind(position)
                put_back(sequence)
                sequence.kept = None
            else:
                behind = sequence.layers_ahead(position) - 1
                sequence.begin_rewind(position)
                put_back(sequence)
                sequence.end_rewind(behind)
                self.settle(position)
                return
        sequence.rewind_layer(position)
        self.settle(position)

    def settle(self, position: int) -> None:
        """Stand at `position`, with the rows that the layers of the same policy have by now."""
        # First, so that an interrupt leaves no step that this position would be taken for.
        self.steps.forget()
        if not position:
            # The next rows may have another dtype, which a decode step would not look for.
            self._key_shape = self._value_shape = None
        self.offset = position
        self.grow(self.steps.rows)

    def grow(self, rows: int) -> None:
        """Append rows up to `rows`, and tell the steps of the policy that it was done."""
        self.store.grow(rows)
        held = self.store.rows
        if held:
            self.steps.has_grown(self.index, held)

    def hold(self) -> LayerState:
        """What the layer holds, which stays as it is when the layer goes on."""
        return LayerState(self.store.copy(), self._key_dtype, self._value_dtype)

    def restore(self, state: LayerState, position: int) -> None:
        """Hold what a layer of the same geometry held at `position`."""
        # One statement: a layer that stands at a position has rows.
        self.store, self.offset = state.rows.copy(), position
        self._accept(state.key_dtype, state.value_dtype)

    def _in_callers_dtype(self, view: RowView) -> KeysValues:
        keys, values = view.dense()
        return keys.astype(self._key_dtype), values.astype(self._value_dtype)

    def check(self, keys: mx.array, values: mx.array) -> None:
        """Raise `UpdateShapeError` or `UpdateDtypeError` unless the layer takes these rows."""
        geometry = self.geometry
        heads = geometry.kv_heads
        for name, array in (("keys", keys), ("values", values)):
            if not isinstance(array, mx.array):
                raise UpdateDtypeError(
                    f"cache layer {self.index} takes {name} as an mlx array, got "
                    f"{type(array).__name__}; wrap it in mx.array first"
                )
        if keys.ndim != 4 or values.ndim != 4:
            self._refuse_shape(keys, values, "both must have four axes [B, H, T, D]")
        batch, key_heads, count, key_dim = keys.shape
        if (key_heads, key_dim) != (heads, geometry.key_dim):
            self._refuse_shape(keys, values, "the keys' heads or dim do not fit")
        if values.shape != (batch, heads, count, geometry.value_dim):
            self._refuse_shape(keys, values, "the values do not fit the keys or the layer")
        if batch < 1 or count < 1:
            self._refuse_shape(keys, values, "an update needs at least one sequence and one token")
        held = self.batch if self.offset else batch
        if held != batch:
            self._refuse_shape(keys, values, f"the cache holds a batch of {held}; clear it first")
        for name, array in (("keys", keys), ("values", values)):
            if not mx.issubdtype(array.dtype, mx.floating):
                raise UpdateDtypeError(
                    f"cache layer {self.index} takes floating-point {name}, got {array.dtype}; "
                    "cast them first"
                )

    def _refuse_shape(self, keys: mx.array, values: mx.array, reason: str) -> None:
        geometry = self.geometry
        raise UpdateShapeError(
            f"cache layer {self.index} takes keys [B, {geometry.kv_heads}, T, {geometry.key_dim}] "
            f"and values [B, {geometry.kv_heads}, T, {geometry.value_dim}], got "
            f"{list(keys.shape)} and {list(values.shape)}: {reason}"
        )

    @property
    def form(self) -> RowForm | None:
        """The form of the rows that are allocated, None where none are."""
        state = self.store.state
        return RowForm.of(*state) if state else None

    def _form_of(self, keys: mx.array, values: mx.array) -> RowForm:
        """The form in which these rows will be stored."""
        key_dtype, value_dtype = self._storage_dtypes(keys, values)
        return RowForm(keys.shape[0], key_dtype.size, value_dtype.size)

    @property
    def batch(self) -> int:
        """Sequences whose rows are held: they advance together."""
        return self.store.state[0].shape[0]

    def _allocate_for(self, keys: mx.array, values: mx.array) -> None:
        batch, heads, _, key_dim = keys.shape
        key_dtype, value_dtype = self._storage_dtypes(keys, values)
        rows = self.steps.rows
        if not self.store.holds(batch, key_dtype, value_dtype):
            self.store.allocate(
                (batch, heads, rows, key_dim),
                (batch, heads, rows, values.shape[3]),
                key_dtype,
                value_dtype,
            )
        self.grow(rows)
        self._accept(keys.dtype, values.dtype)

    def _accept(self, key_dtype: mx.Dtype, value_dtype: mx.Dtype) -> None:
        """Expect rows of these dtypes from now on."""
        key_shape: tuple[int, ...] | None = None
        value_shape: tuple[int, ...] | None = None
        if self.store.rows and self.store.holds(self.batch, key_dtype, value_dtype):
            geometry, batch = self.geometry, self.batch
            key_shape = (batch, geometry.kv_heads, 1, geometry.key_dim)
            value_shape = (batch, geometry.kv_heads, 1, geometry.value_dim)
        # One statement.
        self._key_dtype, self._value_dtype, self._key_shape, self._value_shape = (
            key_dtype, value_dtype, key_shape, value_shape,
        )  # fmt: skip

    def _storage_dtypes(self, keys: mx.array, values: mx.array) -> tuple[mx.Dtype, mx.Dtype]:
        if self._storage_dtype is not None:
            return self._storage_dtype, self._storage_dtype
        if self.offset:
            held_keys, held_values = self.store.state
            return held_keys.dtype, held_values.dtype
        return keys.dtype, values.dtype
