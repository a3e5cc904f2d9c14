"""Rows that a step overwrites although its own start needs them, kept until the step is done."""

from __future__ import annotations

from typing import NamedTuple

from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.rows import RowStore


class KeptRows(NamedTuple):
    """The store of a layer, and one that holds its rows as they were before the running step.

    Arrays are values, so that this copies nothing: the old rows stay until they are let go.
    """

    store: RowStore
    former: RowStore


def keep(sequence: SequenceLayout, layer: int, store: RowStore) -> None:
    """Keep the rows of a layer that the running step is about to overwrite."""
    kept = sequence.kept
    if kept is None:
        kept = sequence.kept = {}
    if layer in kept:
        # The step writes this layer once more: it was interrupted after the write.
        store.become(kept[layer].former)
    kept[layer] = KeptRows(store, store.copy())


def put_back(sequence: SequenceLayout) -> None:
    """Put the rows back that the unfinished step of a sequence has overwritten. May be repeated."""
    for store, former in (sequence.kept or {}).values():
        store.become(former.copy())
