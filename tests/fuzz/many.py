"""Histories of many sequences in one cache, against a dictionary of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.cache.snapshot import Snapshot
from mlx_kvcache.errors import (
    CapacityError,
    GeometryError,
    PositionError,
    RewindError,
    StepError,
    UnknownSequenceError,
)
from mlx_kvcache.layout.steps import DeclaredStep
from tests.fuzz.history import History
from tests.support.many_sequences_books import Books, expect, expect_one_of, take_high_water
from tests.support.many_sequences_driver import (
    GROUPS,
    HEADS,
    KEY_DIM,
    SCALE,
    Driver,
    Token,
    geometry_of,
    observe,
)

WINDOWS = ((0,), (3,), (0, 3), (4, 4), (1, 0), (2, 0, 5), (0, 1, 3))
MOST_SEQUENCES = 5
Spans = list[tuple[int, int]]


class ManyHistory(History):
    """new, fork, step, rewind, remove, snapshots, and steps and verbs that are interrupted."""

    cache_class: ClassVar[type[Any]]
    turns = 18
    must_meet: ClassVar[tuple[str, ...]] = (
        "interrupts", "step over several", "a sequence in two spans", "fork", "refused declaration",
        "remove", "restore", "reserve", "in a thread", "half-done, abandon", "half-done, rewind",
        "half-done, remove", "half-done, finish", "stale declaration", "verb before a step",
        "interrupted step", "interrupted fork", "interrupted remove", "interrupted rewind",
        "interrupted restore", "interrupted new", "interrupt, before", "interrupt, after",
        "max_context", "shared KV", "stored as another dtype",
    )  # fmt: skip

    def begin(self) -> None:
        random = self.random
        windows = random.choice(WINDOWS)
        shared = [layer for layer in range(len(windows)) if random.random() < 0.25]
        max_context = random.choice((None, None, 14))
        kv_dtype = random.choice((None, None, None, None, "float16", "bfloat16"))
        self.driver: Driver[Any] = Driver(
            self.cache_class,
            windows,
            capacity=random.choice((9, 16, 30, 60)),
            initial_capacity=random.choice((0, 1, 2, 4, 16)),
            spare=random.choice((1, 1, 2, 3)),
            shared=shared,
            max_context=max_context,
            kv_dtype=kv_dtype,
            seed=self.seed,
        )
        self.snapshots: list[tuple[Snapshot[Any], Books]] = []
        self.told.append(f"windows {windows}, shared {shared}, {self.driver.config}")
        self.meets("max_context", max_context is not None)
        self.meets("shared KV", bool(shared))
        self.meets("stored as another dtype", kv_dtype is not None)
        for _ in range(random.randint(1, 3)):
            self.driver.new()

    def verbs(self) -> Mapping[str, float]:
        truth = self.driver.truth
        verbs = {"take_snapshot": 0.7, "refusals": 0.4}
        if len(truth) < MOST_SEQUENCES:
            verbs["new"] = 1.0 if truth else 9.0
        if truth:
            verbs |= {"step": 8.0, "half_done_step": 1.5, "rewind": 2.0, "remove": 0.8}
            verbs["verb_before_step"] = 0.8
            if len(truth) < MOST_SEQUENCES:
                verbs["fork"] = 1.6
        if self.snapshots:
            verbs["restore"] = 0.8
        return verbs

    def check(self) -> None:
        driver = self.driver
        driver.check()
        windows = [window for window in driver.windows if window > 1]
        sizes = [window + driver.config.spare - 1 for window in windows]
        high = max((driver.high_water[s] for s in driver.truth), default=0)
        self.meets("a ring wrapped", high > min(sizes, default=high))
        if isinstance(driver.cache, MLXCellCache):
            self.meets("holes", driver.cache.used_end > driver.cache.used)

    def settle_thread(self) -> None:
        mx.eval(self.driver.cache.state)

    def end(self) -> None:
        """Nothing is left once every sequence is gone."""
        cache = self.driver.cache
        for sequence in cache.sequences:
            cache.remove(sequence)
        assert (cache.used, cache.free) == (0, cache.capacity)

    def one(self) -> int:
        return self.random.choice(sorted(self.driver.truth))

    def spans(self) -> Spans:
        """Those of a step: a token for each of some sequences, or several of any."""
        sequences = sorted(self.driver.truth)
        if self.chance(0.6):
            chosen = self.random.sample(sequences, self.random.randint(1, len(sequences)))
            return [(sequence, 1) for sequence in chosen]
        counts = (1, 1, 2, 3, 5, 9)
        times = self.random.randint(1, 3)
        return [(self.one(), self.random.choice(counts)) for _ in range(times)]

    def fits(self, spans: Spans) -> bool:
        driver = self.driver
        if sum(count for _, count in spans) > driver.room:
            return False
        limit = driver.config.max_context
        ends = {sequence: len(driver.truth[sequence]) for sequence, _ in spans}
        for sequence, count in spans:
            ends[sequence] += count
        return limit is None or max(ends.values()) <= limit

    def fitting(self) -> Spans | None:
        """Spans that fit; None, after their refusal, when those drawn do not."""
        spans = self.spans()
        self.tell(spans)
        if self.fits(spans):
            return spans
        self.meets("refused declaration")
        self.driver.refused(CapacityError, lambda: self.driver.cache.declare_step(spans))
        return None

    def attempt(self, verb: Any, after: Books) -> bool:
        """A verb that may be interrupted: then it was made, or was not. Whether it was not."""
        before = Books.of(self.driver)
        if self.call(verb):
            return True
        self.driver.cache.abandon_step()
        held = expect_one_of(self.driver, (before, after))
        self.meets("interrupt, after" if held is after else "interrupt, before")
        return False

    def new(self) -> None:
        self.attempt(self.driver.new, Books.of(self.driver).with_new())

    def fork(self) -> None:
        driver, sequence = self.driver, self.one()
        length = len(driver.truth[sequence])
        up_to = self.random.choice((None, length, self.random.randint(0, length)))
        wanted = length if up_to is None else up_to
        self.tell(sequence, up_to)
        if not driver.reachable(sequence, wanted):
            driver.refused(RewindError, lambda: driver.cache.fork(sequence, up_to))
            self.meets("refused fork")
        elif isinstance(driver.cache, MLXBatchedSequenceCache) and wanted > driver.room:
            driver.refused(CapacityError, lambda: driver.cache.fork(sequence, up_to))
            self.meets("refused fork")
        else:
            after = Books.of(driver).with_fork(sequence, wanted)
            self.attempt(lambda: driver.fork(sequence, up_to), after)

    def remove(self) -> None:
        driver, sequence = self.driver, self.one()
        self.tell(sequence)
        self.attempt(lambda: driver.remove(sequence), Books.of(driver).without(sequence))

    def rewind(self) -> None:
        driver, sequence = self.driver, self.one()
        length = len(driver.truth[sequence])
        position = self.random.randint(max(0, length - 5) if self.chance(0.8) else 0, length)
        self.tell(sequence, position)
        if not driver.reachable(sequence, position):
            driver.refused(RewindError, lambda: driver.cache.rewind(sequence, position))
            self.meets("refused rewind")
            return
        after = Books.of(driver).rewound(sequence, position)
        self.attempt(lambda: driver.rewind(sequence, position), after)

    def take_snapshot(self) -> None:
        def take() -> None:
            self.snapshots.append((self.driver.cache.snapshot(), Books.of(self.driver)))

        self.attempt(take, Books.of(self.driver))
        self.snapshots = self.snapshots[-3:]

    def restore(self) -> None:
        """Into the cache, or into another of the same geometry and config."""
        driver = self.driver
        snapshot, after = self.random.choice(self.snapshots)
        if self.chance(0.25):
            driver.cache = self.cache_class(
                geometry_of(driver.windows, driver.shared), driver.config
            )
            expect(driver, Books({}, {}))

        def restore() -> None:
            driver.cache.restore(snapshot)
            expect(driver, after)

        self.attempt(restore, after)

    def step(self) -> None:
        spans = self.fitting()
        while spans is not None and self.fits(spans):
            self.meets("step over several", len(dict(spans)) > 1)
            self.meets("a sequence in two spans", len(dict(spans)) < len(spans))
            if not self._step(spans) or self.chance(0.5):
                return
            self.tell("again")

    def _step(self, spans: Spans) -> bool:
        """A step through every layer; whether it was not interrupted."""
        driver, before = self.driver, Books.of(self.driver)
        running: list[tuple[DeclaredStep, list[Token]]] = []
        reached = [0]

        def run() -> None:
            step = driver.declare(spans)
            tokens = driver.run(step, ())
            running.append((step, tokens))
            for layer in driver.layers:
                reached[0] = layer
                driver.attend(layer, step, tokens)

        if self.call(run):
            return True
        if running:
            after = Books.of(driver)
            self._mend_step(*running[0], reached[0], before, after)
        else:
            expect(driver, before)
            self._mend_nothing(before)
        return False

    def _mend_nothing(self, before: Books) -> None:
        """A declaration was interrupted: it stands or not, and nothing else has changed."""
        assert not self.driver.cache.unfinished
        if self.chance(0.5):
            self.driver.cache.abandon_step()
        expect_one_of(self.driver, (before,))

    def _mend_step(
        self, step: DeclaredStep, tokens: list[Token], layer: int, before: Books, after: Books
    ) -> None:
        """What was interrupted in a layer is taken back, or finished, or was finished already."""
        driver, cache = self.driver, self.driver.cache
        if dict(cache.unfinished):
            assert dict(cache.unfinished) == step.starts
            self._mend_placed(step, tokens, layer, before, after)
            return
        lengths = {sequence: cache.position(sequence) for sequence in step.starts}
        if lengths == step.starts:
            cache.abandon_step()
            expect_one_of(driver, (before,))
            self.meets("interrupt, before")
        else:
            assert lengths == step.ends, "neither before the step nor after it"
            expect_one_of(driver, (after,))
            self.meets("interrupt, after")

    def _mend_placed(
        self, step: DeclaredStep, tokens: list[Token], layer: int, before: Books, after: Books
    ) -> None:
        way = self.random.choice(("abandon", "rewind", "remove", "finish", "finish"))
        if way == "finish" and self.was_in_thread:
            # The masks of a step belong to the thread that began it.
            way = "abandon"
        self.tell(f"[{way}]")
        if way == "finish":
            expect(self.driver, after)
            if self._finishes(step, tokens, layer):
                self.meets("half-done, finish")
                expect_one_of(self.driver, (after,))
                return
            way = "abandon"
        self.take_back(step, way, before, after)

    def _finishes(self, step: DeclaredStep, tokens: list[Token], layer: int) -> bool:
        """Whether the layers from this one on took the step; one may have written it already."""
        driver = self.driver
        keys, values = driver.rows_of(layer, tokens)
        positions = list(step.positions)
        try:
            driver._checked(
                layer,
                step,
                lambda q: driver.cache.attend(layer, q, keys, values, SCALE, positions=positions),
            )
        except (StepError, GeometryError):
            # Of a batched step some sequences may have been written, and the rows that a step
            # wider than the spare rows is answered with are lost with the answer.
            assert isinstance(driver.cache, MLXBatchedSequenceCache)
            return False
        for following in driver.layers[layer + 1 :]:
            driver.attend(following, step, tokens)
        return True

    def take_back(self, step: DeclaredStep, way: str, before: Books, after: Books) -> None:
        """Take an unfinished step back, in one of the ways there are."""
        driver, cache = self.driver, self.driver.cache
        held = before
        expect(driver, before)
        driver.refused(StepError, lambda: cache.declare_step([(step.sequences[0], 1)]))
        for sequence, start in step.starts.items():
            if way == "rewind":
                cache.rewind(sequence, start)
                held = held.rewound(sequence, start)
            elif way == "remove":
                cache.remove(sequence)
                held = held.without(sequence)
        cache.abandon_step()
        assert not cache.unfinished
        taken = held.copy()
        for sequence, start in step.starts.items():
            if way != "remove" and start:
                taken.high_water[sequence] = after.high_water[sequence]
            elif way != "remove":
                held.high_water[sequence] = taken.high_water[sequence] = 0
        expect(driver, held)
        take_high_water(driver, (held, taken))
        driver.check()
        self.meets(f"half-done, {way}")

    def half_done_step(self) -> None:
        """Some layers are never called."""
        driver, spans = self.driver, self.fitting()
        if spans is None:
            return
        before = Books.of(driver)
        step = driver.declare(spans)
        count = self.random.randint(0, len(driver.windows) - 1)
        self.tell("layers", count)
        tokens = driver.run(step, range(count))
        after = Books.of(driver)
        if count:
            self._mend_placed(step, tokens, count, before, after)
        else:
            driver.cache.abandon_step()
            expect_one_of(driver, (before,))

    def verb_before_step(self) -> None:
        """A declaration stands while it is still right, and is refused when it is not."""
        driver, spans = self.driver, self.fitting()
        if spans is None:
            return
        cache, step = driver.cache, driver.declare(spans)
        verb = self.random.choice(("new", "fork", "remove", "rewind"))
        self.tell(verb)
        if verb in ("remove", "rewind") or len(driver.truth) < MOST_SEQUENCES:
            getattr(self, verb)()
        declared = cache.layout.now.declared
        if declared is not step:
            # The verb was interrupted, and the declaration abandoned with it; or it was refused.
            assert declared is None
            return
        moved = any(len(driver.truth.get(s, (0,) * 99)) != at for s, at in step.starts.items())
        if moved:
            driver.refused(StepError, lambda: self._plain(step.tokens))
            self.meets("stale declaration")
        elif step.tokens > cache.free:
            driver.refused(CapacityError, lambda: self._plain(step.tokens))
        else:
            driver.run(step, driver.layers)
            self.meets("verb before a step")

    def _plain(self, tokens: int) -> mx.array:
        keys = mx.zeros((1, HEADS, tokens, KEY_DIM))
        values = mx.zeros((1, HEADS, tokens, 3))
        queries = mx.zeros((1, HEADS * GROUPS, tokens, KEY_DIM))
        answer: mx.array = self.driver.cache.attend(0, queries, keys, values, SCALE)
        return answer

    def refusals(self) -> None:
        """Calls that must be refused, and change nothing."""
        cache, refused = self.driver.cache, self.driver.refused
        refused(UnknownSequenceError, lambda: cache.remove(77))
        refused(StepError, lambda: cache.declare_step([]))
        if not self.driver.truth:
            return
        sequence = self.one()
        length = len(self.driver.truth[sequence])
        refused(RewindError, lambda: cache.fork(sequence, length + 1))
        refused(RewindError, lambda: cache.rewind(sequence, length + 1))
        refused(CapacityError, lambda: cache.declare_step([(sequence, self.driver.room + 1)]))
        if self.fits([(sequence, 1)]):
            refused(PositionError, lambda: cache.declare_step([(sequence, 1)], [length + 1]))


class CellHistory(ManyHistory):
    kind = "cells"
    cache_class: ClassVar[type[Any]] = MLXCellCache
    must_meet: ClassVar[tuple[str, ...]] = (
        *ManyHistory.must_meet, "defragment", "cells moved", "interrupted defragment", "holes",
        "interrupted reserve",
    )  # fmt: skip

    def verbs(self) -> Mapping[str, float]:
        return {**super().verbs(), "defragment": 1.0, "reserve": 0.5}

    def defragment(self) -> None:
        cache, books = self.driver.cache, Books.of(self.driver)
        moved: list[int] = []
        if self.attempt(lambda: moved.append(cache.defragment()), books):
            self.meets("cells moved", moved[0] > 0)
            assert cache.used_end == cache.used
            before = observe(cache)
            assert cache.defragment() == 0
            assert observe(cache) == before

    def reserve(self) -> None:
        driver = self.driver
        count = self.random.randint(0, driver.config.capacity)
        self.tell(count)
        self.attempt(lambda: driver.cache.reserve(count), Books.of(driver))


class BatchedHistory(ManyHistory):
    kind = "batched"
    cache_class: ClassVar[type[Any]] = MLXBatchedSequenceCache
    must_meet: ClassVar[tuple[str, ...]] = (
        *(what for what in ManyHistory.must_meet if what != "reserve"),
        "a ring wrapped", "refused rewind", "refused fork",
    )  # fmt: skip
