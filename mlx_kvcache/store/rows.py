"""The growing store of one cache layer: its keys and its values, rows on axis 2."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_kvcache.errors import UpdateShapeError
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.store.kernels import ring_join, ring_write
from mlx_kvcache.store.write import write_rows


class KVPool:
    """Keys [B, H, rows, key_dim] and values [B, H, rows, value_dim] of one layer.

    Nothing is held until `allocate`. The pool's own references to its two buffers are the only
    ones that this package keeps: a second one, held anywhere, would turn the next in-place write
    into a copy of the whole pool.
    """

    __slots__ = ("_keys", "_values")

    def __init__(self) -> None:
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def keys(self) -> mx.array | None:
        """The whole buffer of the keys, None before the first write.

        May be replaced by an array of the same shape and dtype, such as the same rows with a
        dependency added; anything else raises `UpdateShapeError`.
        """
        return self._keys

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self._keys = _replacement("keys", self._keys, array)

    @property
    def values(self) -> mx.array | None:
        """The whole buffer of the values; see `keys`."""
        return self._values

    @values.setter
    def values(self, array: mx.array) -> None:
        self._values = _replacement("values", self._values, array)

    @property
    def rows(self) -> int:
        """Rows allocated."""
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        if self._keys is None or self._values is None:
            return 0
        return self._keys.nbytes + self._values.nbytes

    def allocate(
        self,
        key_shape: tuple[int, int, int, int],
        value_shape: tuple[int, int, int, int],
        key_dtype: mx.Dtype,
        value_dtype: mx.Dtype,
    ) -> None:
        """Begin with zero rows of these shapes, in place of whatever was held."""
        self._keys = mx.zeros(key_shape, key_dtype)
        self._values = mx.zeros(value_shape, value_dtype)

    def grow(self, rows: int) -> None:
        """Append zero rows up to `rows`; the rows in use keep their places.

        Does nothing while nothing is allocated.
        """
        if self._keys is not None and self._values is not None:
            self._keys = _with_rows(self._keys, rows)
            self._values = _with_rows(self._values, rows)

    def write(
        self,
        runs: Sequence[Run],
        starts: Sequence[int | mx.array],
        keys: mx.array,
        values: mx.array,
    ) -> None:
        """Write the newest rows of keys and values [B, H, T, D] to `runs`, oldest first.

        `starts` are the starts of the runs, in the form in which they are to be written. When
        the runs hold fewer rows than T, the leading rows are left out.
        """
        self._keys = _written(self._keys, runs, starts, keys)
        self._values = _written(self._values, runs, starts, values)

    def read(self, runs: Sequence[Run]) -> tuple[mx.array, mx.array]:
        """The rows of `runs`, in order: a view of one run, a joined copy of several."""
        return _joined(_slices(self._keys, runs)), _joined(_slices(self._values, runs))

    def read_before(
        self, runs: Sequence[Run], keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The rows of `runs` followed by the new rows, which pass through the storage dtype.

        The rounding keeps an answer the same whether its rows were stored before or not.
        """
        return _before(self._keys, runs, keys), _before(self._values, runs, values)


def _replacement(name: str, held: mx.array | None, array: mx.array) -> mx.array:
    # A decode step writes at a row that was checked against the buffer's shape, not again.
    if held is None or array.shape != held.shape or array.dtype != held.dtype:
        now = "nothing is held yet" if held is None else f"{list(held.shape)} {held.dtype} is held"
        raise UpdateShapeError(
            f"{name} can only be replaced by a buffer of the same shape and dtype: {now}, "
            f"got {list(array.shape)} {array.dtype}; use update_and_fetch to add rows"
        )
    return array


def _allocated(array: mx.array | None) -> mx.array:
    assert array is not None, "the pool is allocated before it is read or written"
    return array


def _with_rows(array: mx.array, rows: int) -> mx.array:
    batch, heads, held, dim = array.shape
    if rows <= held:
        return array
    # Joined with one number stretched over the new rows: zeros of their own would be written twice.
    more = mx.broadcast_to(mx.array(0, array.dtype), (batch, heads, rows - held, dim))
    return mx.concatenate([array, more], axis=2)


def _written(
    pool: mx.array | None,
    runs: Sequence[Run],
    starts: Sequence[int | mx.array],
    rows: mx.array,
) -> mx.array:
    array = _allocated(pool)
    stored = sum(run.length for run in runs)
    if stored < rows.shape[2]:
        rows = rows[:, :, rows.shape[2] - stored :]
    if len(runs) == 1:
        return write_rows(array, rows, starts[0])
    # Two runs: the rows wrap, and the pool is the whole ring.
    return ring_write(array, rows.astype(array.dtype), runs[0].start)


def _before(pool: mx.array | None, runs: Sequence[Run], rows: mx.array) -> mx.array:
    array = _allocated(pool)
    rows = rows.astype(array.dtype)
    if not runs:
        return rows
    return ring_join(array, rows, runs[0].start, sum(run.length for run in runs))


def _slices(pool: mx.array | None, runs: Sequence[Run]) -> list[mx.array]:
    array = _allocated(pool)
    rows = array.shape[2]
    return [
        array if run == (0, rows) else array[:, :, run.start : run.start + run.length]
        for run in runs
    ]


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
