"""Rows for every layer of a cache, asked for before any of them is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kvcache.cache.step import PolicySteps
from mlx_kvcache.facts.config import item_size
from mlx_kvcache.facts.geometry import LayerGeometry
from mlx_kvcache.layout.footprint import growth_bytes
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.store.memory import Named, affordable
from mlx_kvcache.store.rows import KeysValues

#: What doubling would add is divided into so many parts, of which as many are taken as can be had.
PARTS = 1024


class RowForm(NamedTuple):
    """What decides on the bytes of a row: the batch, and the bytes of a number."""

    batch: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> RowForm:
        """The form of the rows of two buffers."""
        return cls(keys.shape[0], keys.dtype.size, values.dtype.size)

    @classmethod
    def least(cls, kv_dtype: str | None) -> RowForm:
        """Where nothing was written yet: one sequence, in 16 bits unless a dtype is chosen."""
        size = item_size(kv_dtype)
        return cls(1, size, size)

    @classmethod
    def first(cls, kv_dtype: str | None, rows: KeysValues | None) -> RowForm | None:
        """That of the first rows: in the dtype that is chosen, else their own; None: not known."""
        if kv_dtype is not None:
            return cls.least(kv_dtype)
        return None if rows is None else cls.of(*rows)

    def row_bytes(self, layer: LayerGeometry) -> int:
        """Bytes of one row of a layer, keys and values."""
        numbers = layer.key_dim * self.key_size + layer.value_dim * self.value_size
        return self.batch * layer.kv_heads * numbers


class SequenceGrowth:
    """Grows all layers of one sequence together, by lazy doubling.

    Where twice the rows cannot be had, as many as can. Every layer that begins a step beyond
    `SequenceLayout.room` asks here first.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        steps: Sequence[PolicySteps],
        sequence: SequenceLayout,
    ) -> None:
        self._layers = layers
        self._steps = steps
        self._distinct = tuple(dict.fromkeys(steps))
        self._sequence = sequence

    def make_room(self, position: int, tokens: int, form: RowForm, held: RowForm | None) -> None:
        """Let every layer have the rows of a step; they are allocated when it is written.

        form: of the rows after the step. held: of those that are there, None where none are.
        Raises `MemoryLimitError`, or `PositionError` or `CapacityError` for a step that may not
        run, and then changes nothing.
        """
        self._sequence.admit(position, tokens)
        self.take(affordable_lengths([Wanted(self, position + tokens, form, held)])[0])

    def reserve(self, length: int, form: RowForm, held: RowForm | None) -> None:
        """Let every layer have the rows of `length` positions. Raises as `make_room`."""
        check_lengths([Wanted(self, length, form, held)], grows=True)
        for step in self._distinct:
            step.reserve(length)
        if self._sequence.length:
            self.note_room()

    def doubled(self, end: int) -> int:
        """The length to ask for so that `end` positions fit, by doubling."""
        return max(step.doubled(end) for step in self._distinct)

    def rows_for(self, length: int) -> int:
        """The most rows that a layer has once `length` positions have been asked for."""
        return max(step.rows_for(length) for step in self._distinct)

    def bytes_for(
        self, length: int, form: RowForm, held: RowForm | None, is_bare: bool = False
    ) -> int:
        """Bytes to be had for `length` positions.

        is_bare: without the rows that were to be there from the start and are not yet.
        """
        return growth_bytes(self._pools(length, form, held, is_bare))

    def take(self, length: int) -> None:
        """Let every layer have the rows of `length` positions, which can be had."""
        for step in self._distinct:
            step.reserve(length)
        self.note_room()

    def note_room(self) -> None:
        """Tell the sequence up to where every layer may have rows."""
        self._sequence.room = min(step.room for step in self._distinct)

    def _pools(
        self, length: int, form: RowForm, held: RowForm | None, is_bare: bool
    ) -> Iterator[tuple[int, int]]:
        """The bytes that each layer has, and those that it will have."""
        wanted = {step: step.rows_for(length, is_bare) for step in self._distinct}
        for index, (layer, step) in enumerate(zip(self._layers, self._steps, strict=True)):
            rows = step.rows_of(index)
            has = held.row_bytes(layer) * rows if held else 0
            will_have = form.row_bytes(layer) * wanted[step]
            if held == form:
                yield has, max(has, will_have)
            else:
                # The old rows are let go before.
                yield 0, max(0, will_have - has)


class Wanted(NamedTuple):
    """A sequence that is to have rows for `end` positions; the forms as in `make_room`."""

    growth: SequenceGrowth
    end: int
    form: RowForm
    held: RowForm | None

    def bytes_for(self, length: int, is_bare: bool = False) -> int:
        """Bytes to be had for `length` positions."""
        return self.growth.bytes_for(length, self.form, self.held, is_bare)

    def part(self, parts: int) -> int:
        """The length at `end`, and so many parts of what doubling would add."""
        return self.end + (self.growth.doubled(self.end) - self.end) * parts // PARTS


def affordable_lengths(wanted: Sequence[Wanted]) -> list[int]:
    """The lengths to grow to, by doubling, or as far as there is memory for all of them.

    Raises `MemoryLimitError` when there is none for their ends.
    """
    parts = _affordable_parts(wanted, PARTS, grows=True)
    return [each.part(parts) for each in wanted]


def check_lengths(wanted: Sequence[Wanted], grows: bool = False) -> None:
    """Raise `MemoryLimitError` unless there is memory for the ends of all.

    grows: whether it is taken then.
    """
    _affordable_parts(wanted, 0, grows)


def _affordable_parts(wanted: Sequence[Wanted], most: int, grows: bool) -> int:
    def cost(parts: int) -> int:
        return sum(each.bytes_for(each.part(parts)) for each in wanted)

    def bare_cost(length: int) -> int:
        return sum(each.bytes_for(length, is_bare=True) for each in wanted)

    rows = sum(each.growth.rows_for(each.end) for each in wanted)
    units = "positions" if len(wanted) == 1 else f"positions in each of {len(wanted)} sequences"
    named = Named(rows, bare_cost, units)
    return affordable(0, most, cost, f"rows for {rows} positions", named, grows)
