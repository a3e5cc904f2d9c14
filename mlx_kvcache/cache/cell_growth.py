"""Cells for every layer, asked for before any of them is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kvcache.cache.growth import RowForm
from mlx_kvcache.facts.geometry import LayerGeometry
from mlx_kvcache.layout.footprint import growth_bytes
from mlx_kvcache.store.memory import Named, affordable
from mlx_kvcache.store.rows import KeysValues, RowStore


def cell_form(
    stores: Sequence[RowStore], kv_dtype: str | None, rows: KeysValues | None
) -> RowForm | None:
    """The form of the rows: that of those held, or chosen, or of the first ones; None: unknown."""
    held = next((store.state for store in stores if store.rows), None)
    if held is not None:
        return RowForm.of(*held)
    return RowForm.first(kv_dtype, rows)


def affordable_cells(
    layers: Sequence[LayerGeometry],
    stores: Sequence[RowStore],
    form: RowForm,
    least: int,
    most: int,
    floor: int = 0,
    grows: bool = True,
) -> int:
    """The most cells, from `least` to `most`, for which there is memory.

    floor: those that there will be at least. grows: whether they are taken then. Raises
    `MemoryLimitError` when there is none for `least`.
    """
    pools = [
        (store.rows, form.row_bytes(layer)) for store, layer in zip(stores, layers, strict=True)
    ]

    def bare_cost(count: int) -> int:
        return growth_bytes((rows * size, max(rows, count) * size) for rows, size in pools)

    def cost(count: int) -> int:
        return bare_cost(max(count, floor))

    what = f"rows for {max(least, floor)} cells"
    return affordable(least, most, cost, what, Named(most, bare_cost, "cells"), grows)
