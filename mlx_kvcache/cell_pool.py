"""The rows of one layer over the cells that many sequences share."""

from __future__ import annotations

import mlx.core as mx

from mlx_kvcache.pool import KVPool


class CellPool(KVPool):
    """Keys and values [1, H, cells, D] of one layer, which can be written at any cells."""

    __slots__ = ()

    def scatter(self, cells: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [1, H, T, D] to these T cells, cast to the storage dtype."""
        assert self._keys is not None, "the pool is allocated before it is written"
        assert self._values is not None
        index = cells[None, None, :, None]
        # The pool's buffer is written in place as long as nobody else holds it.
        self._keys = mx.put_along_axis(self._keys, index, keys.astype(self._keys.dtype), axis=2)
        self._values = mx.put_along_axis(
            self._values, index, values.astype(self._values.dtype), axis=2
        )

    def gather(self, cells: mx.array, rows: int) -> None:
        """Keep the rows of `cells` only, in this order, in a pool of `rows` rows."""
        if self._keys is None or self._values is None:
            return
        self._keys = mx.take(self._keys, cells, axis=2)
        self._values = mx.take(self._values, cells, axis=2)
        self.grow(rows)

    def drop(self) -> None:
        """Give all memory back."""
        self._keys = self._values = None
