"""The rows of one cache layer: how they are kept, written and read.

A cache layer has a `RowStore`; nothing above asks how it keeps its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.core import slice_update

from mlx_kvcache.errors import UpdateShapeError
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.store.kernels import cell_gather, cell_scatter, ring_join, ring_write
from mlx_kvcache.store.ops import ROW_AXIS, with_rows, write_rows

KeysValues = tuple[mx.array, mx.array]
#: Batch, KV heads, rows, head dim.
Shape = tuple[int, int, int, int]


class Placement(NamedTuple):
    """Where the new rows of a step go: made once, used by every layer that keeps them alike.

    runs: contiguous rows, in the order of the tokens. starts: the starts of the runs, in the form
    in which they are to be written. cells: int32 [T], single rows in place of the runs.
    """

    runs: tuple[Run, ...]
    starts: tuple[int | mx.array, ...]
    cells: mx.array | None = None


class RowView(NamedTuple):
    """Rows as they lie: `runs` of the two buffers, in the order in which they are to be read."""

    keys: mx.array
    values: mx.array
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> RowView:
        """All rows of two arrays."""
        return cls(keys, values, (Run(0, keys.shape[2]),))

    def dense(self) -> KeysValues:
        """The rows as two arrays [B, H, S, D]: views of one run, joined copies of several."""
        return _joined(self.keys, self.runs), _joined(self.values, self.runs)


class RowStore(Protocol):
    """The keys and values of one cache layer, rows on axis 2.

    A store keeps the only references to its buffers: a second one, held anywhere, would turn the
    next write in place into a copy of all rows. Both buffers change in one statement, so that an
    interrupt finds them alike.

    keys, values: the buffers, where rows are stored as they are given (`holds`): a decode step
    writes its row into them without a call.
    """

    keys: mx.array | None
    values: mx.array | None

    @property
    def rows(self) -> int:
        """Rows allocated."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def state(self) -> list[mx.array]:
        """Every array that is alive."""

    def allocate(
        self, key_shape: Shape, value_shape: Shape, key_dtype: mx.Dtype, value_dtype: mx.Dtype
    ) -> None:
        """Begin with zero rows of these shapes, in place of whatever was held."""

    def holds(self, batch: int, key_dtype: mx.Dtype, value_dtype: mx.Dtype) -> bool:
        """Whether rows of this batch and these dtypes are stored as they are."""

    def write(self, placement: Placement, keys: mx.array, values: mx.array) -> None:
        """Write keys [B, H, T, key_dim] and values [B, H, T, value_dim] as placed."""

    def read(self, runs: tuple[Run, ...]) -> RowView:
        """The rows of `runs`, in order."""

    def read_before(self, runs: tuple[Run, ...], keys: mx.array, values: mx.array) -> RowView:
        """The rows of `runs` followed by new rows, as they will be read once they are stored."""

    def renewed(self, view: RowView, end: int) -> RowStore:
        """A ring as large as this one, with the newest rows of a view that ends at position `end`.

        view: what `read_before` has answered, at least as many rows as the ring has.
        """

    def grow(self, rows: int) -> None:
        """Append rows up to `rows`; those in use keep their places. Nothing before `allocate`."""

    def move(self, rows: mx.array, allocated: int) -> None:
        """Keep these rows only, in this order, in a store of `allocated` rows."""

    def copy(self) -> RowStore:
        """A store of the same rows, which shares them until either is written."""

    def replace(self, name: str, array: mx.array) -> None:
        """Put an array in the place of the buffer `name`. Raises `UpdateShapeError`."""


class DenseRows:
    """Rows as they are given: keys [B, H, rows, key_dim] and values [B, H, rows, value_dim].

    Nothing is held until `allocate`. The buffers may be replaced by arrays of the same shape and
    dtype, such as the same rows with a dependency added.
    """

    __slots__ = ("_copied", "keys", "values")

    def __init__(self, keys: mx.array | None = None, values: mx.array | None = None) -> None:
        self.keys = keys
        self.values = values
        # Whether a copy may hold the buffers as well. It outlives a decode step, which writes
        # without a call here; then one write takes the path for shared rows without need.
        self._copied = False

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        return [array for array in (self.keys, self.values) if array is not None]

    def allocate(
        self, key_shape: Shape, value_shape: Shape, key_dtype: mx.Dtype, value_dtype: mx.Dtype
    ) -> None:
        keys, values = mx.zeros(key_shape, key_dtype), mx.zeros(value_shape, value_dtype)
        self.keys, self.values = keys, values

    def holds(self, batch: int, key_dtype: mx.Dtype, value_dtype: mx.Dtype) -> bool:
        keys, values = self.keys, self.values
        if keys is None or values is None:
            return False
        return (keys.shape[0], keys.dtype, values.dtype) == (batch, key_dtype, value_dtype)

    def write(self, placement: Placement, keys: mx.array, values: mx.array) -> None:
        held_keys, held_values = self._held()
        keys = _written(held_keys, placement, keys, self._copied)
        values = _written(held_values, placement, values, self._copied)
        self.keys, self.values = keys, values
        self._copied = False

    def read(self, runs: tuple[Run, ...]) -> RowView:
        return RowView(*self._held(), runs)

    def read_before(self, runs: tuple[Run, ...], keys: mx.array, values: mx.array) -> RowView:
        # Through the storage dtype, so that an answer is the same whether its rows were stored
        # before or not.
        held_keys, held_values = self._held()
        return RowView.of(_before(held_keys, runs, keys), _before(held_values, runs, values))

    def renewed(self, view: RowView, end: int) -> DenseRows:
        size = self.rows
        return DenseRows(_as_ring(view.keys, size, end), _as_ring(view.values, size, end))

    def grow(self, rows: int) -> None:
        if self.keys is not None and self.values is not None:
            keys, values = with_rows(self.keys, rows), with_rows(self.values, rows)
            self.keys, self.values = keys, values

    def move(self, rows: mx.array, allocated: int) -> None:
        if self.keys is None or self.values is None:
            return
        if not rows.size:
            self.keys = self.values = None
            return
        keys = cell_gather(self.keys, rows, allocated)
        values = cell_gather(self.values, rows, allocated)
        self.keys, self.values = keys, values
        self._copied = False

    def copy(self) -> DenseRows:
        twin = DenseRows(self.keys, self.values)
        twin._copied = self._copied = True
        return twin

    def __deepcopy__(self, _memo: dict[int, Any]) -> DenseRows:
        return self.copy()

    def replace(self, name: str, array: mx.array) -> None:
        held = getattr(self, name)
        # A decode step writes at a row that was checked against the buffer's shape, not again.
        if held is None or array.shape != held.shape or array.dtype != held.dtype:
            now = "nothing is" if held is None else f"{list(held.shape)} {held.dtype} is"
            raise UpdateShapeError(
                f"{name} can only be replaced by a buffer of the same shape and dtype: {now} "
                f"held, got {list(array.shape)} {array.dtype}; use update_and_fetch to add rows"
            )
        setattr(self, name, array)

    def _held(self) -> KeysValues:
        keys, values = self.keys, self.values
        assert keys is not None, "rows are allocated before they are read or written"
        assert values is not None
        return keys, values


def _written(buffer: mx.array, placement: Placement, rows: mx.array, shared: bool) -> mx.array:
    runs, starts, cells = placement
    if cells is not None:
        return cell_scatter(buffer, rows.astype(buffer.dtype), cells, shared=shared)
    if len(runs) == 1:
        if isinstance(starts[0], mx.array):
            return slice_update(buffer, rows, starts[0], ROW_AXIS)
        return write_rows(buffer, rows, starts[0])
    if _wraps(runs, buffer.shape[2]):
        return ring_write(buffer, rows.astype(buffer.dtype), runs[0].start, shared=shared)
    row = 0
    for run, start in zip(runs, starts, strict=True):
        buffer = write_rows(buffer, rows[:, :, row : row + run.length], start)
        row += run.length
    return buffer


def _wraps(runs: Sequence[Run], rows: int) -> bool:
    """Whether the rows go on from the end of the buffer to its beginning."""
    return len(runs) == 2 and sum(runs[0]) == rows and not runs[1].start


def _before(buffer: mx.array, runs: Sequence[Run], rows: mx.array) -> mx.array:
    rows = rows.astype(buffer.dtype)
    if not runs:
        return rows
    return ring_join(buffer, rows, runs[0].start, sum(run.length for run in runs))


def _as_ring(rows: mx.array, size: int, end: int) -> mx.array:
    """The newest `size` rows, of which the last has position `end` - 1, in the order of slots."""
    newest = end % size
    first = rows.shape[2] - newest
    return mx.concatenate([rows[:, :, first:], rows[:, :, first - size + newest : first]], axis=2)


def _joined(buffer: mx.array, runs: Sequence[Run]) -> mx.array:
    if len(runs) == 1:
        start, length = runs[0]
        whole = not start and length == buffer.shape[2]
        return buffer if whole else buffer[:, :, start : start + length]
    return mx.concatenate([buffer[:, :, start : start + n] for start, n in runs], axis=2)
