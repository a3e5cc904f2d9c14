"""The rows of one layer over the cells that many sequences share."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_kvcache.layout.runs import Run
from mlx_kvcache.store.kernels import cell_gather, cell_scatter
from mlx_kvcache.store.rows import KVPool
from mlx_kvcache.store.write import write_rows


class CellPool(KVPool):
    """Keys and values [1, H, cells, D] of one layer, which can be written at any cells."""

    __slots__ = ()

    def place(
        self,
        runs: Sequence[Run],
        starts: Sequence[int | mx.array],
        keys: mx.array,
        values: mx.array,
    ) -> None:
        """Write keys and values [1, H, T, D] to runs that lie anywhere, T cells in all.

        `starts` are the starts of the runs, in the form in which they are to be written.
        """
        self._keys = _placed(self._keys, runs, starts, keys)
        self._values = _placed(self._values, runs, starts, values)

    def scatter(self, cells: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [1, H, T, D] to these T cells, cast to the storage dtype."""
        assert self._keys is not None, "the pool is allocated before it is written"
        assert self._values is not None
        self._keys = cell_scatter(self._keys, keys.astype(self._keys.dtype), cells)
        self._values = cell_scatter(self._values, values.astype(self._values.dtype), cells)

    def gather(self, cells: mx.array, rows: int) -> None:
        """Keep the rows of `cells` only, in this order, in a pool of `rows` rows."""
        if self._keys is None or self._values is None:
            return
        self._keys = cell_gather(self._keys, cells)
        self._values = cell_gather(self._values, cells)
        self.grow(rows)

    def drop(self) -> None:
        """Give all memory back."""
        self._keys = self._values = None


def _placed(
    pool: mx.array | None, runs: Sequence[Run], starts: Sequence[int | mx.array], rows: mx.array
) -> mx.array:
    assert pool is not None, "the pool is allocated before it is written"
    row = 0
    for run, start in zip(runs, starts, strict=True):
        new = rows if run.length == rows.shape[2] else rows[:, :, row : row + run.length]
        pool = write_rows(pool, new, start)
        row += run.length
    return pool
