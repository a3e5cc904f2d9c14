"""An interruption at any line of a schedule: the same answers, cells and bytes as without one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_kvcache.cache
from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import KVCacheError, StepError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.layout.cells import CellLayout
from tests.support.arrays import raw
from tests.support.interrupts import Fuse, Interrupter
from tests.support.many_sequences_driver import GROUPS, HEADS, KEY_DIM, SCALE, VALUE_DIM, observe
from tests.support.many_sequences_driver import geometry_of as geometry

PACKAGE = Path(mlx_kvcache.cache.__file__).parents[1]
NAMES = ("shared", "standing", "cells", "batched", "attend", "steps")
FILES = frozenset(
    str(PACKAGE / room / f"{name}.py") for room in ("layout", "cache") for name in NAMES
)
CACHES = [MLXCellCache, MLXBatchedSequenceCache]
WINDOWS = (0, 3)


class User:
    """Runs a schedule, and goes on after an interruption as its user would."""

    def __init__(self, cache_class: type[Any], at: int | None = None) -> None:
        self.cache = cache_class(geometry(WINDOWS), CacheConfig(60, None, 2, 2))
        self.interrupter = Interrupter(FILES, at)
        self.random = np.random.default_rng(3)
        self.answers: list[Any] = []

    def call(self, function: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> Any:
        try:
            return self.interrupter.call(function)
        except KeyboardInterrupt:
            self.cache.abandon_step()
            return undo() or function()

    def new(self) -> int:
        return self._begun(self.cache.new)

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        return self._begun(lambda: self.cache.fork(sequence, up_to))

    def _begun(self, verb: Callable[[], int]) -> int:
        before = self.cache.sequences

        def forget() -> None:
            for sequence in self.cache.sequences:
                if sequence not in before:
                    self.cache.remove(sequence)

        identity: int = self.call(verb, forget)
        assert identity not in before
        assert self.cache.sequences == tuple(sorted((*before, identity)))
        return identity

    def remove(self, sequence: int) -> None:
        cache = self.cache
        self.call(lambda: sequence in cache.sequences and cache.remove(sequence))

    def rewind(self, sequence: int, position: int) -> None:
        self.call(lambda: self.cache.rewind(sequence, position))

    def step(self, *spans: tuple[int, int]) -> None:
        cache = self.cache
        tokens = sum(count for _, count in spans)
        starts = {sequence: cache.position(sequence) for sequence, _ in spans}
        queries, keys, values = (
            [
                mx.array(self.random.normal(size=(1, heads, tokens, dim)).astype(np.float32))
                for _ in WINDOWS
            ]
            for heads, dim in ((HEADS * GROUPS, KEY_DIM), (HEADS, KEY_DIM), (HEADS, VALUE_DIM))
        )

        def run() -> list[Any]:
            cache.declare_step(spans)
            cache.step_positions()
            parts = zip(queries, keys, values, strict=True)
            given = [cache.attend(layer, *rows, SCALE) for layer, rows in enumerate(parts)]
            return [raw(each) for each in given]

        def take_back() -> str | None:
            assert not cache.unfinished
            try:
                for sequence, start in starts.items():
                    cache.rewind(sequence, start)
            except KVCacheError:
                # It was finished, and is too large to be taken back: its last answer is lost.
                assert all(cache.position(s) > start for s, start in starts.items())
                return "lost"
            return None

        self.answers.append(self.call(run, take_back))

    def defragment(self) -> None:
        if isinstance(self.cache, MLXCellCache):
            self.call(self.cache.defragment)

    def there_and_back(self, sequence: int) -> None:
        held = self.call(self.cache.snapshot)
        self.step((sequence, 2))
        self.call(lambda: self.cache.restore(held))

    def schedule(self) -> User:
        a, b = self.new(), self.new()
        self.step((a, 3), (b, 2))
        self.step((b, 1), (a, 1), (b, 1))
        c = self.fork(a, 3)
        for _ in range(3):
            self.step((c, 1), (a, 1), (b, 1))
        self.rewind(b, 5)
        self.step((a, 6), (b, 1))
        self.remove(a)
        self.defragment()
        self.step((c, 2), (b, 1))
        self.there_and_back(c)
        d = self.fork(b)
        self.rewind(c, 0)
        self.step((d, 4), (c, 3))
        self.remove(b)
        self.step((self.new(), 2), (d, 1))
        self.defragment()
        self.step((d, 1))
        return self


def check(cache_class: type[Any], at: int, quiet: User) -> None:
    user = User(cache_class, at).schedule()
    assert len(user.interrupter.lines) > at, "the line was not reached"
    place = user.interrupter.lines[at]
    pairs = zip(user.answers, quiet.answers, strict=True)
    assert all(own == "lost" or own == other for own, other in pairs), place
    own, other = observe(user.cache), observe(quiet.cache)
    assert own == other, place


@pytest.mark.parametrize("cache_class", CACHES)
def test_an_interrupt_at_some_lines(cache_class: Any) -> None:
    quiet = User(cache_class).schedule()
    lines = quiet.interrupter.lines
    assert len(lines) > 1000
    for at in random.Random(7).sample(range(len(lines)), 40):
        check(cache_class, at, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("cache_class", CACHES)
def test_an_interrupt_at_every_line(cache_class: Any) -> None:
    """The first and the last time that it is reached."""
    quiet = User(cache_class).schedule()
    lines = quiet.interrupter.lines
    first = {place: at for at, place in reversed(list(enumerate(lines)))}
    last = {place: at for at, place in enumerate(lines)}
    for at in sorted({*first.values(), *last.values()}):
        check(cache_class, at, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("cache_class", CACHES)
def test_an_interrupted_layer_that_is_asked_again_answers_or_says_that_it_cannot(
    cache_class: Any,
) -> None:
    """A batched step that only some of its sequences hold is to be abandoned."""
    outcomes: Counter[str] = Counter()
    for at in itertools.count():
        user = User(cache_class)
        a, b = user.new(), user.new()
        user.step((a, 3), (b, 2))
        draw = np.random.default_rng(5).normal
        rows = [
            mx.array(draw(size=(1, heads, 2, dim)).astype(np.float32))
            for heads, dim in ((HEADS * GROUPS, KEY_DIM), (HEADS, KEY_DIM), (HEADS, VALUE_DIM))
        ]
        held = user.cache.snapshot()
        user.cache.declare_step([(a, 1), (b, 1)])
        expected = raw(user.cache.attend(0, *rows, SCALE))
        user.cache.abandon_step()
        user.cache.restore(held)
        step = user.cache.declare_step([(a, 1), (b, 1)])

        def ask(cache=user.cache, rows=rows, step=step) -> Any:
            return raw(cache.attend(0, *rows, SCALE, positions=list(step.positions)))

        fuse = Fuse(at)
        try:
            fuse.call(ask)
        except KeyboardInterrupt:
            pass
        else:
            break
        try:
            assert ask() == expected, fuse.place
            outcomes["answered"] += 1
        except StepError:
            assert cache_class is MLXBatchedSequenceCache
            outcomes["refused"] += 1
            user.cache.abandon_step()
            user.cache.declare_step([(a, 1), (b, 1)])
            assert raw(user.cache.attend(0, *rows, SCALE)) == expected
    assert outcomes["answered"] > 50
    assert (outcomes["refused"] > 50) == (cache_class is MLXBatchedSequenceCache)


def test_what_is_left_torn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above see cells that are not derived anew."""

    def forget(self: CellLayout) -> None:
        self._is_torn = False

    quiet = User(MLXCellCache).schedule()
    monkeypatch.setattr(CellLayout, "_mend", forget)
    wrong = 0
    for at in range(0, len(quiet.interrupter.lines), 31):
        try:
            check(MLXCellCache, at, quiet)
        except Exception:
            wrong += 1
    assert wrong > 3
