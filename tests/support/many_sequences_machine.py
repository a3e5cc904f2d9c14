"""Random schedules over a cache of many sequences, for both layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import (
    AttentionError,
    CapacityError,
    GeometryError,
    LayerIndexError,
    PositionError,
    RewindError,
    StepError,
    UnknownSequenceError,
    UpdateDtypeError,
    UpdateShapeError,
)
from tests.support.many_sequences_driver import HEADS, KEY_DIM, SCALE, VALUE_DIM, Driver

Spans = list[tuple[int, int]]


class SharedMachine(RuleBasedStateMachine):
    """new / fork / step / rewind / remove, refused calls, and steps that stop half-way."""

    cache_class: type[Any]
    met: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.run: Driver[Any]

    @initialize(
        windows=st.sampled_from([(0, 3, 0, 5), (4, 4, 4), (0, 0), (1, 0, 2)]),
        capacity=st.sampled_from([16, 30, 80]),
        spare=st.integers(1, 3),
        initial=st.integers(0, 4),
        seed=st.integers(0, 1000),
        lengths=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    )
    def begin(
        self,
        windows: tuple[int, ...],
        capacity: int,
        spare: int,
        initial: int,
        seed: int,
        lengths: list[int],
    ) -> None:
        self.run = Driver(
            self.cache_class,
            windows,
            capacity=capacity,
            spare=spare,
            initial_capacity=initial,
            shared=[len(windows) - 1],
            max_context=None if seed % 2 else 14,
            seed=seed,
        )
        for length in lengths:
            sequence = self.run.new()
            if length:
                self.run.step([(sequence, length)])

    def one_of(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.run.truth)), label="sequence")

    def spans(self, data: st.DataObject) -> Spans:
        """Spans of a step, also several of one sequence; mostly of one token each."""
        span = st.tuples(
            st.sampled_from(sorted(self.run.truth)), st.sampled_from([1, 1, 1, 1, 2, 5])
        )
        return data.draw(st.lists(span, min_size=1, max_size=4), label="spans")

    def problem(self, spans: Spans) -> type[Exception] | None:
        """What must refuse a step of known sequences, if anything."""
        if sum(count for _, count in spans) > self.run.room:
            return CapacityError
        total: Counter[int] = Counter()
        for sequence, count in spans:
            total[sequence] += count
        limit = self.run.cache.layout.max_context
        if limit and any(len(self.run.truth[s]) + n > limit for s, n in total.items()):
            return CapacityError
        return None

    def fitting(self, data: st.DataObject) -> Spans | None:
        """Spans that fit; None, after a refusal, when the drawn ones do not."""
        spans = self.spans(data)
        error = self.problem(spans)
        if error is None:
            return spans
        self.met[f"refused step {error.__name__}"] += 1
        self.run.refused(error, lambda: self.run.cache.declare_step(spans))
        return None

    @rule()
    def new(self) -> None:
        if len(self.run.truth) < 6:
            self.run.new()

    @precondition(lambda self: self.run.truth)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        spans = self.fitting(data)
        if spans is not None:
            self.run.step(spans)
            self.met["step"] += 1
            while data.draw(st.booleans(), label="again") and self.problem(spans) is None:
                self.run.step(spans)
            self.met["step over several"] += len(dict(spans)) > 1
            self.met["step with a sequence in two spans"] += len(dict(spans)) < len(spans)

    @precondition(lambda self: self.run.truth)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        run, sequence = self.run, self.one_of(data)
        length = len(run.truth[sequence])
        up_to = data.draw(st.one_of(st.none(), st.integers(0, length)), label="up to")
        wanted = length if up_to is None else up_to
        if not run.reachable(sequence, wanted):
            run.refused(RewindError, lambda: run.cache.fork(sequence, up_to))
            self.met["refused fork below the floor"] += 1
        elif isinstance(run.cache, MLXBatchedSequenceCache) and wanted > run.room:
            run.refused(CapacityError, lambda: run.cache.fork(sequence, up_to))
            self.met["refused fork beyond the capacity"] += 1
        elif len(run.truth) < 6:
            used = run.cache.used
            run.fork(sequence, up_to)
            self.met["fork"] += 1
            if isinstance(run.cache, MLXCellCache):
                assert run.cache.used == used

    @precondition(lambda self: self.run.truth)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        run, sequence = self.run, self.one_of(data)
        position = data.draw(st.integers(0, len(run.truth[sequence])), label="position")
        if run.reachable(sequence, position):
            run.rewind(sequence, position)
            self.met["rewind"] += 1
        else:
            run.refused(RewindError, lambda: run.cache.rewind(sequence, position))
            self.met["refused rewind below the floor"] += 1

    @precondition(lambda self: len(self.run.truth) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.run.remove(self.one_of(data))
        self.met["remove"] += 1

    @precondition(lambda self: self.run.truth)
    @rule(data=st.data(), verb=st.sampled_from(["new", "fork", "remove", "rewind"]))
    def verb_between_declaration_and_step(self, data: st.DataObject, verb: str) -> None:
        """A declaration stands while it is still right, and is refused when it is not."""
        run, spans = self.run, self.fitting(data)
        if spans is None or len(run.truth) >= 6:
            return
        step = run.declare(spans)
        sequence = self.one_of(data)
        length = len(run.truth[sequence])
        if verb == "new":
            run.new()
        elif verb == "fork" and (isinstance(run.cache, MLXCellCache) or length <= run.room):
            run.fork(sequence)
        elif verb == "remove" and len(run.truth) > 1:
            run.remove(sequence)
        elif verb == "rewind":
            run.rewind(sequence, 0)
        if any(
            len(run.truth.get(s, ())) != at or s not in run.truth for s, at in step.starts.items()
        ):
            run.refused(StepError, lambda: self.attend(0, step.tokens))
            self.met["stale declaration"] += 1
        elif step.tokens > run.cache.capacity - run.cache.used:
            run.refused(CapacityError, lambda: self.attend(0, step.tokens))
        else:
            run.run(step, run.layers)
            self.met["verb before a step"] += 1

    @precondition(lambda self: self.run.truth)
    @rule(data=st.data(), repair=st.sampled_from(["abandon", "rewind", "remove"]))
    def interrupted_step(self, data: st.DataObject, repair: str) -> None:
        """Some layers are written, the others never are."""
        run, spans = self.run, self.fitting(data)
        if spans is None:
            return
        step = run.declare(spans)
        count = data.draw(st.integers(1, len(run.windows) - 1), label="layers")
        highs = dict(run.high_water)
        run.run(step, range(count))
        assert run.cache.unfinished == step.starts
        broken = step.sequences[0]
        run.refused(StepError, lambda: run.cache.declare_step([(broken, 1)]))
        start = step.starts[broken]
        run.refused(StepError, lambda: run.cache.fork(broken))
        run.refused(StepError, lambda: run.cache.rewind(broken, start + 1))
        if isinstance(run.cache, MLXCellCache):
            run.refused(StepError, run.cache.defragment)
        # Such rings were kept, and with them the high water.
        kept = {s: highs[s] for s, at in step.starts.items() if not run.reachable(s, at)}
        self.met["a ring that was kept"] += bool(kept) and repair != "remove"
        for sequence, position in step.starts.items():
            if repair == "remove":
                run.remove(sequence)
            elif repair == "rewind":
                run.rewind(sequence, position)
        run.cache.abandon_step()
        if repair == "abandon":
            for sequence, position in step.starts.items():
                del run.truth[sequence][position:]
                if not position:
                    run.high_water[sequence] = 0
        if repair != "remove":
            run.high_water.update(kept)
        assert not run.cache.unfinished
        self.met[f"interrupted, {repair}"] += 1
        run.refused(StepError, lambda: self.attend(0, step.tokens))

    def attend(self, layer: int, tokens: int, **changes: Any) -> mx.array:
        """A step of plain rows, with changes that may make it wrong."""
        keys = mx.zeros((1, HEADS, tokens, KEY_DIM))
        arguments: dict[str, Any] = {
            "queries": keys,
            "keys": keys,
            "values": mx.zeros((1, HEADS, tokens, VALUE_DIM)),
            "scale": SCALE,
            **changes,
        }
        return self.run.cache.attend(layer, **arguments)

    @rule(which=st.integers(0, 8), data=st.data())
    def refused_verb(self, which: int, data: st.DataObject) -> None:
        cache, refused = self.run.cache, self.run.refused
        gone = data.draw(st.sampled_from([-1, 99, True, "0"]), label="unknown id")
        if which == 0:
            refused(UnknownSequenceError, lambda: cache.fork(gone))
            refused(UnknownSequenceError, lambda: cache.remove(gone))
            refused(UnknownSequenceError, lambda: cache.rewind(gone, 0))
            refused(UnknownSequenceError, lambda: cache.position(gone))
        elif which == 1:
            refused(StepError, lambda: cache.declare_step([]))
        elif not self.run.truth:
            refused(UnknownSequenceError, lambda: cache.declare_step([(0, 1)]))
        else:
            self.refused_of(self.one_of(data), which)

    def refused_of(self, sequence: int, which: int) -> None:
        run, cache, refused = self.run, self.run.cache, self.run.refused
        length = len(run.truth[sequence])
        if which == 2:
            refused(RewindError, lambda: cache.fork(sequence, length + 1))
            refused(RewindError, lambda: cache.fork(sequence, -1))
        elif which == 3:
            refused(RewindError, lambda: cache.rewind(sequence, length + 1))
            refused(RewindError, lambda: cache.rewind(sequence, -1))
        elif which == 4:
            for bad in ([(sequence, 0)], [sequence], [(sequence, 1, 2)], [(sequence, True)]):
                refused(StepError, lambda bad=bad: cache.declare_step(bad))
        elif which == 5:
            refused(UnknownSequenceError, lambda: cache.declare_step([(sequence, 1), (77, 1)]))
        elif which == 6:
            more = run.room + 1
            refused(CapacityError, lambda: cache.declare_step([(sequence, more)]))
        elif self.problem([(sequence, 2)]) is None:
            spans = [(sequence, 1), (sequence, 1)]
            for bad in ([length, length], [length + 1, length + 2], [length]):
                refused(PositionError, lambda bad=bad: cache.declare_step(spans, bad))

    @precondition(lambda self: self.run.truth)
    @rule(data=st.data())
    def refused_update(self, data: st.DataObject) -> None:
        """Every wrong way to give a declared step to a layer; then the declaration still stands."""
        run, spans = self.run, self.fitting(data)
        if spans is None:
            return
        step = run.declare(spans)
        tokens, refused = step.tokens, run.refused
        wide = mx.zeros((1, HEADS, tokens + 1, KEY_DIM))
        whole = mx.zeros((1, HEADS, tokens, KEY_DIM), mx.int32)
        later = [position + 1 for position in step.positions]
        calls: list[tuple[type[Any], Callable[[], Any]]] = [
            (LayerIndexError, lambda: self.attend(len(run.windows), tokens)),
            (LayerIndexError, lambda: self.attend(-1, tokens)),
            (UpdateShapeError, lambda: self.attend(0, tokens, keys=wide)),
            (UpdateShapeError, lambda: self.attend(0, tokens, values=wide)),
            (UpdateShapeError, lambda: self.attend(0, tokens + 1)),
            (UpdateDtypeError, lambda: self.attend(0, tokens, keys=whole)),
            (AttentionError, lambda: self.attend(0, tokens, queries=wide)),
            (AttentionError, lambda: self.attend(0, tokens, queries=whole)),
            (AttentionError, lambda: self.attend(0, tokens, sinks=mx.zeros((HEADS + 1,)))),
            (PositionError, lambda: self.attend(0, tokens, positions=later)),
            (StepError, lambda: run.cache.declare_step([])),
            (UnknownSequenceError, lambda: run.cache.declare_step([(88, 1)])),
            (CapacityError, lambda: run.cache.declare_step([(spans[0][0], run.room + 1)])),
            (StepError, lambda: run.cache.attend_again(0, wide, SCALE)),
        ]
        for error, call in calls:
            refused(error, call)
        run.run(step, run.layers)
        self.met["refused update"] += 1
        refused(PositionError, lambda: self.attend(0, tokens, positions=later))
        if 0 not in run.shared:
            refused(StepError, lambda: self.attend(0, tokens))
            try:
                again = self.attend(0, tokens, positions=step.positions)
            except GeometryError:
                # The rows of a step wider than a ring's spare rows are kept for shared layers.
                assert isinstance(run.cache, MLXBatchedSequenceCache)
                assert tokens > run.config.spare
            else:
                assert again.shape[2] == tokens

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "run"):
            self.run.check()
