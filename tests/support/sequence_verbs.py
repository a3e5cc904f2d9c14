"""More verbs of `Session`: snapshots, forks, reservations, and verbs that were interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.cache.snapshot import Snapshot
from mlx_kvcache.errors import PositionError, RewindError
from tests.support.arrays import numbers
from tests.support.sequence_oracle import Question, Session, observe, row_bytes


class Moment(NamedTuple):
    """What a session held when it took a snapshot."""

    snapshots: list[Snapshot[Any]]
    rows: list[list[tuple[np.ndarray, np.ndarray]]]
    stored: list[tuple[mx.Dtype | None, mx.Dtype | None]]
    high_water: int
    batch: int
    dtypes: list[tuple[mx.Dtype, mx.Dtype]]


class LongSession(Session):
    """A session with every verb of its caches.

    After a verb that was interrupted, `stands` and what follows it tell what it has left, and
    demand that it is what was before or what should be.
    """

    @property
    def cache(self) -> MLXSequenceCache:
        """The cache of the first start form: two would be interrupted at different points."""
        return self.caches[0]

    def take_snapshot(self) -> Moment:
        """A moment to go back to."""
        self.flush()
        snapshots = [cache.snapshot() for cache in self.caches]
        return self.moment(snapshots)

    def moment(self, snapshots: list[Snapshot[Any]]) -> Moment:
        """What is held now, by these snapshots."""
        return Moment(
            snapshots,
            [list(truth.rows) for truth in self.truths],
            [(truth.key_dtype, truth.value_dtype) for truth in self.truths],
            self.high_water,
            self.batch,
            list(self.dtypes),
        )

    def hold_moment(self, moment: Moment) -> None:
        """Expect what was held then."""
        self.pending.clear()
        for truth, rows, stored in zip(self.truths, moment.rows, moment.stored, strict=True):
            truth.rows = list(rows)
            truth.key_dtype, truth.value_dtype = stored
        self.high_water, self.batch = moment.high_water, moment.batch
        self.dtypes = list(moment.dtypes)
        self.stands_at(self.length)

    def stands_at(self, length: int) -> None:
        """Every layer of every cache stands at this position."""
        for cache in self.caches:
            assert cache.length == length
            assert [layer.offset for layer in cache.layers] == [length] * len(self.shapes)
            assert cache.layout.high_water == self.high_water

    def fork_at(self, position: int) -> bool:
        """Go on with forks up to a position; the originals must stay as they are."""
        self.flush()
        originals, before = self.caches, [observe(cache) for cache in self.caches]
        try:
            twins = [cache.fork(position) for cache in originals]
        except RewindError:
            assert not self.can_rewind(position), f"no fork up to {position}"
            assert [observe(cache) for cache in originals] == before
            return False
        assert self.can_rewind(position), f"a fork up to {position}"
        self.caches = twins
        self.left_behind = list(zip(originals, before, strict=True))
        self._forget(position)
        return True

    def reserve(self, length: int) -> None:
        """Grow now; what is held stays."""
        self.flush()
        for cache in self.caches:
            cache.reserve(length)

    def after_interrupted_step(self, start: int, count: int, high_water: int) -> list[int]:
        """Take note of what an interrupted step has left; answers the layers that lack it.

        Each layer has written all of it or nothing.
        """
        lag = []
        for layer, truth in zip(self.cache.layers, self.truths, strict=True):
            assert layer.offset in (start, start + count), f"layer {layer.index} is half-way"
            assert len(truth.rows) >= layer.offset, "a row that nobody gave"
            del truth.rows[layer.offset :]
            if layer.offset == start:
                lag.append(layer.index)
        torn = self.cache.layout.unwritten
        assert torn == len(lag) or (not torn and len(lag) == len(self.shapes)), "miscounted"
        self._took_high_water(high_water, start + count)
        self.is_begun = torn == len(self.shapes)
        return lag

    def finish_step(self, count: int, lag: Sequence[int]) -> None:
        """Give an interrupted step to the layers that lack it."""
        self.step(count, [Question()] * len(self.shapes), lag)
        self.flush()

    def refuses_another_step(self, start: int, count: int) -> None:
        """No layer takes the next step as long as one of them lacks the newest."""
        for layer in self.layers:
            behind = self.cache.layers[layer].offset == start
            self.is_refused(layer, count + 1 if behind else 1)

    def refuses(self, layer: int, count: int) -> None:
        """A layer takes no step, whichever batch it holds by now."""
        batch, state = self.batch, self.cache.layers[layer].store.state
        if state and self.cache.layers[layer].offset:
            self.batch = state[0].shape[0]
        self.is_refused(layer, count)
        self.batch = batch

    def after_interrupted_rewind(self, position: int, length: int) -> None:
        """The cache stands at one of the two; going back once more puts every layer there."""
        assert self.cache.length in (position, length)
        self._took_high_water(0 if position == 0 else self.high_water, self.high_water)
        self.cache.rewind(position)
        if position == 0:
            self.high_water = 0
        self._forget(position)

    def goes_on_only_if_whole(self, attempts: int = 1) -> bool:
        """Steps without putting right what was interrupted: refused, or all of it was as before.

        Answers whether they were taken.
        """
        before = self.moment([])
        try:
            for _ in range(attempts):
                if self.room:
                    self.step(1)
            self.flush()
        except PositionError:
            self.hold_rows(before)
            return False
        return True

    def is_at_rest(self) -> bool:
        """Whether every layer stands where the sequence does, and a step may begin."""
        cache = self.cache
        at_rest = all(layer.offset == cache.length for layer in cache.layers)
        return at_rest and not cache.layout.unwritten

    def holds_one_of(self, *possible: Moment) -> None:
        """Find which of these the cache holds, and expect it."""
        self.pending.clear()
        held = observe(self.cache)
        for moment in possible:
            if len(moment.rows[0]) == self.cache.length:
                self.hold_moment(moment)
                if self.holds_rows():
                    return
        raise AssertionError(f"neither before nor after: {held}")

    def holds_rows(self) -> bool:
        """Whether the layers hold the rows that are expected."""
        return all(map(self._holds_rows, self.layers))

    def _holds_rows(self, layer: int) -> bool:
        """Whether a layer holds the rows that are expected of it and that no ring has replaced."""
        truth, cached = self.truths[layer], self.cache.layers[layer]
        if not truth.rows:
            return True
        # Those that the next step may read.
        first = self._first(layer, len(truth.rows), 0)
        size = self.ring_size(layer)
        keys, values = numbers(cached.keys), numbers(cached.values)
        slots = [place % size if size else place for place in range(first, len(truth.rows))]
        if not slots:
            return True
        rows = row_bytes(keys[:, :, slots], values[:, :, slots])
        return rows == truth.rows_as((mx.float32, mx.float32), first, len(truth.rows))

    def hold_rows(self, moment: Moment) -> None:
        """Expect the rows of then, of caches that are yet to be put right."""
        self.pending.clear()
        for truth, rows, stored in zip(self.truths, moment.rows, moment.stored, strict=True):
            truth.rows = list(rows)
            truth.key_dtype, truth.value_dtype = stored
        self.high_water = moment.high_water

    def _took_high_water(self, *possible: int) -> None:
        """The high water is one of two: that of before, or what the verb leaves."""
        high = self.cache.layout.high_water
        assert high in {*possible, max(possible)}, f"high water {high}, not one of {possible}"
        self.high_water = high
