"""One layer of a sequence cache: validates an update, writes it, answers with the visible rows."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx.core import slice_update, split

from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.step import PolicyStep
from mlx_kvcache.errors import GeometryError, UpdateDtypeError, UpdateShapeError
from mlx_kvcache.facts.geometry import LayerGeometry
from mlx_kvcache.layout.runs import Run, StepPlan
from mlx_kvcache.store.rows import KVPool
from mlx_kvcache.store.write import ROW_AXIS

KeysValues = tuple[mx.array, mx.array]


class SequenceLayer(KVPool):
    """The keys and values of one cache layer: a pool, and where its sequence stands.

    `offset` is the position of the next token of this layer: a plain attribute, since models
    read it for every layer of every step. It runs ahead of the other layers' within a step.
    """

    __slots__ = (
        "_key_dtype",
        "_key_shape",
        "_step",
        "_storage_dtype",
        "_value_dtype",
        "_value_shape",
        "geometry",
        "index",
        "offset",
    )

    def __init__(
        self,
        index: int,
        geometry: LayerGeometry,
        step: PolicyStep,
        storage_dtype: mx.Dtype | None,
    ) -> None:
        super().__init__()
        self.index = index
        self.geometry = geometry
        self.offset = 0
        self._step = step
        self._storage_dtype = storage_dtype
        # What the newest update that passed every check was given. The shapes are those of one
        # new row, and None where a row must be cast on its way in and out.
        self._key_shape: tuple[int, ...] | None = None
        self._value_shape: tuple[int, ...] | None = None
        self._key_dtype = mx.float32
        self._value_dtype = mx.float32

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceLayer:
        # The arrays are immutable values: both copies hold them until one is written.
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._step = copy.deepcopy(self._step, memo)
        return twin

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Append keys [B, H, T, key_dim] and values [B, H, T, value_dim]; answer what is visible.

        The rows come back in the caller's dtype, in logical order, or in the order of the ring's
        slots when `make_mask` was asked for this step and answered a mask for that order. A dtype
        other than before is looked for in the first layer of a step only.
        Raises `UpdateShapeError`, `UpdateDtypeError`, `PositionError` or `CapacityError`, and
        then nothing has changed.
        """
        step = self._step
        if (
            self.offset != step.position
            or keys.shape != self._key_shape
            or values.shape != self._value_shape
        ):
            return self._update(keys, values)
        # The shapes are known, so the pool is allocated and holds the step's row.
        self._keys = keys = slice_update(self._keys, keys, step.start, ROW_AXIS)  # type: ignore[arg-type]
        self._values = values = slice_update(self._values, values, step.start, ROW_AXIS)  # type: ignore[arg-type]
        self.offset = step.end
        stop = step.stop
        if not stop:
            return keys, values
        # The first of two parts is a view, built faster than a slice.
        return split(keys, (stop,), 2)[0], split(values, (stop,), 2)[0]

    def keys_and_values(self) -> KeysValues:
        """The rows that the newest update of this layer answered with, without another update.

        Raises `UpdateShapeError` when nothing has been written yet, and `GeometryError` after a
        step larger than the ring's spare rows when the geometry does not mark this layer shared:
        the rows that such a step answered with are kept for shared layers only.
        """
        if self._keys is None or self._values is None or self.offset == 0:
            raise UpdateShapeError(
                f"cache layer {self.index} holds no keys and values yet; update it first"
            )
        step = self._step
        plan = step.plan
        if plan is not None and plan.end == self.offset:
            return step.joined.get(self.index) or self._in_callers_dtype(self._answer(plan))
        if step.end == self.offset and step.position >= 0 and not step.stop:
            return self._keys, self._values
        return self._in_callers_dtype(self.read(step.read_runs(self.offset)))

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm passes it by this name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Mask:
        """The mask for the next N tokens, to be asked for before they are written.

        None, "causal" (lower-right aligned) or a bool array [N, S] that fits the S rows which
        the next update answers with. `window_size` narrows the layer's own window. Raises
        `PositionError` for less than one token, `ConfigError` for a negative window.
        """
        return self._step.mask(self.offset, N, window_size or 0, return_array)

    def mask_at(self, position: int, tokens: int) -> Mask:
        """The mask of a step of `tokens` at `position`, be it the next one or the newest one."""
        return self._step.mask(position, tokens, 0, False)

    def wrote_last(self, position: int, tokens: int) -> bool:
        """Whether the newest update of this layer was the step of `tokens` at `position`.

        `keys_and_values` then answers for that step once more: layers that share this one's keys
        and values ask again with equal positions.
        """
        return self.offset == position + tokens and self._step.is_running(position, tokens)

    @property
    def rows_held(self) -> int:
        """Rows that hold a position which is still remembered: all, or a ring's newest."""
        return self._step.rows_held(self.offset)

    def step_back(self, position: int) -> None:
        """Put this layer at an earlier position, and the sequence with it if it is still beyond.

        For callers that go through the layers one by one. Raises `RewindError`, and changes
        nothing, when the position cannot be reached.
        """
        self._step.rewind_sequence(position)
        self.settle(position)

    def settle(self, position: int) -> None:
        """Stand at `position`, with the rows that the layers of the same policy have by now."""
        self.offset = position
        self._step.forget()
        self.grow(self._step.rows)

    def grow(self, rows: int) -> None:
        """Append zero rows up to `rows`, and tell the other layers' step that it was done."""
        super().grow(rows)
        if self._keys is not None:
            self._step.has_grown(self.index)

    def _update(self, keys: mx.array, values: mx.array) -> KeysValues:
        step = self._step
        if (
            keys.shape == self._key_shape
            and values.shape == self._value_shape
            and keys.dtype == self._key_dtype
            and values.dtype == self._value_dtype
            and step.open_decode(self.offset)
        ):
            return self.update_and_fetch(keys, values)
        self._check(keys, values)
        plan = step.open(self.offset, keys.shape[2])
        self._allocate_for(keys, values)
        if plan.joined:
            answer = self.read_before(plan.read, keys, values)
            self.write(plan.write, step.starts, keys, values)
        else:
            self.write(plan.write, step.starts, keys, values)
            answer = self._answer(plan)
        answer = self._in_callers_dtype(answer)
        if plan.joined and self.geometry.shared:
            step.joined[self.index] = answer
        self.offset = plan.end
        return answer

    def _answer(self, plan: StepPlan) -> KeysValues:
        if plan.joined:
            raise GeometryError(
                f"cache layer {self.index} is read again after a step of {plan.tokens} tokens, "
                "more than its spare rows, but its geometry says that no other layer shares it; "
                "set LayerGeometry.shared"
            )
        if self._step.physical:
            return self.read((Run(0, self._step.rows),))
        return self.read(plan.read)

    def _in_callers_dtype(self, rows: KeysValues) -> KeysValues:
        return rows[0].astype(self._key_dtype), rows[1].astype(self._value_dtype)

    def _check(self, keys: mx.array, values: mx.array) -> None:
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
        held = batch if self._keys is None or self.offset == 0 else self._keys.shape[0]
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

    def _allocate_for(self, keys: mx.array, values: mx.array) -> None:
        batch, heads, _, key_dim = keys.shape
        value_dim = values.shape[3]
        key_dtype, value_dtype = self._storage_dtypes(keys, values)
        if not self._holds(batch, key_dtype, value_dtype):
            rows = self._step.rows
            self.allocate(
                (batch, heads, rows, key_dim),
                (batch, heads, rows, value_dim),
                key_dtype,
                value_dtype,
            )
        self.grow(self._step.rows)
        self._key_dtype = keys.dtype
        self._value_dtype = values.dtype
        self._key_shape = self._value_shape = None
        if self._holds(batch, keys.dtype, values.dtype):
            self._key_shape = (batch, heads, 1, key_dim)
            self._value_shape = (batch, heads, 1, value_dim)

    def _storage_dtypes(self, keys: mx.array, values: mx.array) -> tuple[mx.Dtype, mx.Dtype]:
        if self._storage_dtype is not None:
            return self._storage_dtype, self._storage_dtype
        if self.offset and self._keys is not None and self._values is not None:
            return self._keys.dtype, self._values.dtype
        return keys.dtype, values.dtype

    def _holds(self, batch: int, key_dtype: mx.Dtype, value_dtype: mx.Dtype) -> bool:
        if self._keys is None or self._values is None:
            return False
        held = self._keys.shape[0] == batch
        return held and self._keys.dtype == key_dtype and self._values.dtype == value_dtype
