"""Rows that a step overwrites although its own start needs them, kept until the step is done."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.rows import RowStore


class HasRows(Protocol):
    """A layer: what is kept is given back to it."""

    store: RowStore


class KeptRows(NamedTuple):
    """A layer, and its rows as they were before the running step, which writes another store."""

    layer: HasRows
    former: RowStore


def keep(sequence: SequenceLayout, index: int, layer: HasRows) -> None:
    """Keep the rows of a layer that the running step is about to replace."""
    kept = sequence.kept
    if kept is None:
        kept = sequence.kept = {}
    kept[index] = KeptRows(layer, layer.store)


def put_back(sequence: SequenceLayout) -> None:
    """Put the rows back that the unfinished step of a sequence has replaced. May be repeated."""
    for layer, former in (sequence.kept or {}).values():
        layer.store = former.copy()
