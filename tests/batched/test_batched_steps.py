"""MLXBatchedSequenceCache: spans, capacity, forks, the ring floor, and what is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.errors import (
    CapacityError,
    ConfigError,
    PositionError,
    RewindError,
    StepError,
    UnknownSequenceError,
    UpdateDtypeError,
    UpdateShapeError,
)
from mlx_kvcache.facts.config import CacheConfig
from tests.support.arrays import raw
from tests.support.many_sequences_driver import (
    HEADS,
    KEY_DIM,
    SCALE,
    VALUE_DIM,
    Driver,
    geometry_of,
    observe,
)

BatchedDriver = Driver[MLXBatchedSequenceCache]


def driver(*windows: int, **choices: Any) -> BatchedDriver:
    return Driver(MLXBatchedSequenceCache, windows or (0, 3), shared=(), **choices)


def rows(count: int) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.normal((1, HEADS, count, KEY_DIM))
    return keys, keys, mx.random.normal((1, HEADS, count, VALUE_DIM))


def test_spans_of_one_sequence_continue_each_other() -> None:
    run = driver(0, 3)
    a, b = run.new(), run.new()
    step = run.step([(a, 2), (b, 3), (a, 1), (b, 1), (a, 2)])
    assert step.positions == (0, 1, 0, 1, 2, 2, 3, 3, 4)
    run.check()
    run.step([(b, 1), (a, 1), (b, 1)])
    run.check()


def test_rings_wrap_and_evict() -> None:
    run = driver(3, spare=2)
    a, b = run.new(), run.new()
    for _ in range(5):
        run.step([(a, 1), (b, 2)])
    run.step([(a, 9)])
    run.check()
    cache = run.cache
    assert [cache.sequence(s).layers[0].rows for s in (a, b)] == [4, 4]


def test_capacity_is_shared() -> None:
    run = driver(capacity=10)
    a, b = run.new(), run.new()
    run.step([(a, 6)])
    run.step([(b, 2)])
    assert (run.cache.used, run.cache.free) == (8, 2)
    run.refused(CapacityError, lambda: run.cache.declare_step([(a, 2), (b, 1)]))
    run.refused(CapacityError, lambda: run.cache.fork(a))
    twin = run.fork(b)
    assert run.cache.free == 0
    run.refused(CapacityError, lambda: run.cache.declare_step([(twin, 1)]))
    run.rewind(a, 0)
    run.step([(twin, 3), (a, 3)])
    run.remove(b)
    assert run.cache.used == 5 + 3
    run.check()


def test_max_context_limits_one_sequence() -> None:
    run = driver(capacity=20, max_context=4)
    a, b = run.new(), run.new()
    run.step([(a, 4), (b, 3)])
    run.refused(CapacityError, lambda: run.cache.declare_step([(b, 1), (a, 1)]))
    run.refused(CapacityError, lambda: run.cache.declare_step([(b, 1), (b, 1)]))
    run.step([(b, 1)])
    assert run.cache.sequence(a).capacity == 4
    with pytest.raises(ConfigError, match="max_context"):
        driver(max_context=0)


def test_a_placed_step_takes_its_capacity_before_it_is_written() -> None:
    cache = MLXBatchedSequenceCache(geometry_of((0,)), CacheConfig(4))
    a, b = cache.new(), cache.new()
    cache.declare_step([(a, 3)])
    cache.make_mask(0)
    assert (cache.used, cache.position(a)) == (3, 3)
    with pytest.raises(CapacityError):
        cache.declare_step([(b, 2)])
    cache.abandon_step()
    assert cache.used == 0
    cache.declare_step([(b, 2)])


def test_a_refused_declaration_leaves_the_previous_one_standing() -> None:
    run = driver(capacity=10)
    a = run.new()
    step = run.declare([(a, 3)])
    for error, spans, positions in (
        (StepError, [], None),
        (UnknownSequenceError, [(a, 1), (5, 1)], None),
        (CapacityError, [(a, 11)], None),
        (PositionError, [(a, 2)], [0, 2]),
    ):
        run.refused(error, lambda s=spans, p=positions: run.cache.declare_step(s, p))
        assert run.cache.layout.now.declared is step
    run.run(step, run.layers)
    run.check()


def test_forks_diverge() -> None:
    run = driver(0, 3, spare=2)
    a = run.new()
    run.step([(a, 3)])
    for up_to in (None, 2, 0):
        run.fork(a, up_to)
    for _ in range(5):
        run.step([(sequence, 1) for sequence in sorted(run.truth)])
        run.check()


def test_a_fork_of_a_wrapped_ring_reaches_as_far_back_as_its_spare_rows() -> None:
    run = driver(0, 4, spare=3, capacity=200)
    a = run.new()
    for _ in range(21):
        run.step([(a, 1)])
    assert run.cache.rewind_floor(a) == 21 - 3
    run.refused(RewindError, lambda: run.cache.fork(a, 17))
    run.refused(RewindError, lambda: run.cache.rewind(a, 17))
    twin = run.fork(a, 18)
    # The rows of the snapshot beyond 18 are still in its slots: the floor does not move.
    run.refused(RewindError, lambda: run.cache.rewind(twin, 17))
    run.step([(a, 1), (twin, 1)])
    run.check()
    run.rewind(a, 19)
    run.refused(RewindError, lambda: run.cache.rewind(a, 18))
    run.step([(a, 3), (twin, 5)])
    run.check()
    run.rewind(a, 0)
    run.step([(a, 2)])
    run.check()


def test_the_whole_step_is_checked_before_a_sequence_is_touched() -> None:
    run = driver(0, 3, capacity=50)
    a, b = run.new(), run.new()
    run.step([(a, 2), (b, 2)])
    cache = run.cache
    step = run.declare([(a, 1), (b, 2)])
    queries, keys, values = rows(3)
    for error, given in (
        (UpdateShapeError, (queries, keys, values[:, :, :2])),
        (UpdateShapeError, (queries, keys[:, :1], values)),
        (UpdateDtypeError, (queries, keys, values.astype(mx.int32))),
    ):
        run.refused(error, lambda given=given: cache.attend(0, *given, SCALE))
    run.refused(
        PositionError, lambda: cache.attend(0, queries, keys, values, SCALE, positions=[2, 2, 2])
    )
    run.run(step, run.layers)
    run.check()


def test_one_answer_needs_one_sequence() -> None:
    run = driver(0, 3)
    cache = run.cache
    a, b = run.new(), run.new()
    run.declare([(a, 1), (b, 1)])
    keys, _, values = rows(2)
    run.refused(StepError, lambda: cache.make_mask(0))
    run.refused(StepError, lambda: cache.update_and_fetch(0, keys, values))
    cache.declare_step([(b, 2)])
    assert cache.make_mask(1) == "causal"
    for layer in (0, 1):
        held, _ = cache.update_and_fetch(layer, keys, values)
        assert raw(held) == raw(keys)
    cache.declare_step([(b, 1), (b, 1)])
    assert cache.make_mask(0) == "causal"
    held, _ = cache.update_and_fetch(0, keys, values)
    assert held.shape[2] == 4


def test_an_interrupted_step_can_be_taken_back() -> None:
    run = driver(0, 3, 3, spare=2)
    a, b = run.new(), run.new()
    for _ in range(4):
        run.step([(a, 1), (b, 2)])
    cache = run.cache
    before = {s: len(rows) for s, rows in run.truth.items()}
    step = run.declare([(a, 1), (b, 2)])
    run.run(step, [0, 1])
    assert cache.unfinished == before
    run.refused(StepError, lambda: cache.declare_step([(a, 1)]))
    cache.abandon_step()
    for sequence, length in before.items():
        del run.truth[sequence][length:]
    run.check()
    # Three tokens overwrite more than a wrapped ring of two spare rows can give back: it is kept.
    highs = dict(run.high_water)
    step = run.declare([(a, 1), (b, 3)])
    run.run(step, [0, 1])
    assert cache.rewind_floor(b) == highs[b] - 2 == before[b]
    cache.abandon_step()
    for sequence, length in before.items():
        del run.truth[sequence][length:]
    run.high_water[b] = highs[b]
    run.check()
    # Once the step is finished, nothing is kept of it.
    run.step([(a, 1), (b, 3)])
    with pytest.raises(RewindError, match=f"cannot go back to {before[b]} in sequence {b}"):
        cache.rewind(b, before[b])
    run.check()
    run.step([(a, 2)])


@pytest.mark.parametrize("keeps", [True, False])
def test_a_sequence_that_was_done_when_another_was_interrupted(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keeps:
        monkeypatch.setattr(MLXBatchedSequenceCache, "_keep_rings", lambda *_: None)
    run = driver(3, 3, spare=2)
    a, b = run.new(), run.new()
    for _ in range(4):
        run.step([(a, 2), (b, 2)])
    before = {s: len(rows) for s, rows in run.truth.items()}
    highs = dict(run.high_water)
    step = run.declare([(a, 4), (b, 4)])
    run.run(step, [0])
    write, calls = SequenceLayer.write, []

    def interrupted(layer: SequenceLayer, *rows: mx.array) -> Any:
        calls.append(layer)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(layer, *rows)

    monkeypatch.setattr(SequenceLayer, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run(step, [1])
    monkeypatch.setattr(SequenceLayer, "write", write)
    members = run.cache.layout.now.members
    assert (members[a].layout.unwritten, members[b].layout.unwritten) == (0, 1)
    if not keeps:
        # Its rings were overwritten, and it alone knows of no step that is to be taken back.
        with pytest.raises(RewindError):
            run.cache.abandon_step()
        return
    run.cache.abandon_step()
    for sequence, length in before.items():
        del run.truth[sequence][length:]
    run.high_water.update(highs)
    run.check()
    run.step([(a, 1), (b, 4)])
    run.check()


def test_an_id_that_is_given_again_inherits_nothing() -> None:
    run = driver(0, 3)
    a, b = run.new(), run.new()
    run.step([(a, 5), (b, 5)])
    run.remove(a)
    run.refused(UnknownSequenceError, lambda: run.cache.position(a))
    assert run.new() == a
    run.step([(a, 2), (b, 1)])
    run.check()


def test_a_refusal_says_what_to_do() -> None:
    run = driver(capacity=4)
    a = run.new()
    with pytest.raises(StepError, match="call declare_step before every forward pass"):
        run.cache.attend(0, *rows(1), SCALE)
    with pytest.raises(CapacityError, match="4 are free; remove or rewind sequences"):
        run.cache.declare_step([(a, 5)])
    with pytest.raises(UnknownSequenceError, match=r"Live: 0$"):
        run.cache.fork(3)
    assert observe(run.cache)[1] == 0
