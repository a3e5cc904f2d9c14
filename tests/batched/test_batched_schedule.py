"""Long schedules over MLXBatchedSequenceCache, and the bugs that they notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache.cache.batched import BatchedStep, MLXBatchedSequenceCache
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.facts.geometry import LayerPolicy
from mlx_kvcache.layout.batched import BatchedLayout
from mlx_kvcache.layout.sequence import SequenceLayout
from tests.support.many_sequences_driver import Driver
from tests.support.many_sequences_schedule import run_schedule

pytestmark = pytest.mark.slow

WINDOWS = (0, 3, 0, 5)


def run_all() -> None:
    for seed in range(3):
        driver = Driver(MLXBatchedSequenceCache, WINDOWS, capacity=60, seed=seed)
        run_schedule(driver, 150, seed)


@pytest.mark.parametrize("form", ["array", "integer"])
@pytest.mark.parametrize("seed", range(3))
def test_long_schedules(form: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_KVCACHE_START", form)
    driver = Driver(MLXBatchedSequenceCache, WINDOWS, capacity=90, spare=seed + 1, seed=seed)
    met = run_schedule(driver, 200, seed)
    for what in ("step", "step over several", "fork", "rewind", "remove", "refused rewind"):
        assert met[what] > 0, f"{what} was never met"
    assert driver.seen > 1000


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def bug(name: str) -> Callable[[Any], Any]:
    def keep(plant: Any) -> Any:
        BUGS[name] = plant
        return plant

    return keep


@bug("a fork keeps what lies beyond it")
def _(patch: pytest.MonkeyPatch) -> None:
    original = MLXBatchedSequenceCache.fork
    patch.setattr(MLXBatchedSequenceCache, "fork", lambda self, s, up_to=None: original(self, s))  # noqa: ARG005


@bug("a fork shares its layers with its origin")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MLXSequenceCache, "fork", lambda self, up_to=None: copy.copy(self))  # noqa: ARG005


@bug("masks are asked for after the rows were written")
def _(patch: pytest.MonkeyPatch) -> None:
    original = BatchedStep.masks

    def write(self: MLXBatchedSequenceCache, step: BatchedStep, layer: int, *rows: Any) -> None:
        step._masks.clear()
        parts = zip(step.layers[layer], *map(step.split, rows), strict=True)
        held = [own.write(*each) for own, *each in parts]
        step.answers = layer, held, original(step, layer, self.geometry.layers[layer].policy)

    patch.setattr(MLXBatchedSequenceCache, "_write", write)


@bug("every sequence gets the first one's mask")
def _(patch: pytest.MonkeyPatch) -> None:
    original = BatchedStep.masks

    def masks(self: BatchedStep, layer: int, policy: LayerPolicy) -> Any:
        held = original(self, layer, policy)
        return [held[0]] * len(held)

    patch.setattr(BatchedStep, "masks", masks)


@bug("sequences get each other's tokens")
def _(patch: pytest.MonkeyPatch) -> None:
    original = BatchedStep.split

    def split(self: Any, array: mx.array) -> list[mx.array]:
        parts = original(self, array)
        alike = [part.shape == parts[0].shape for part in parts]
        return parts[::-1] if all(alike) else parts

    patch.setattr(BatchedStep, "split", split)


@bug("answers are joined sequence by sequence")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchedStep, "join", lambda _, parts: mx.concatenate(list(parts), axis=2))


@bug("any position can be rewound to")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceLayout, "check_rewind", lambda *_: None)
    patch.setattr(BatchedLayout, "rewind_floor", lambda *_: 0)


@bug("a rewind lowers the high water")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SequenceLayout.rewind

    def rewind(self: SequenceLayout, position: int) -> None:
        original(self, position)
        self._high_water = self._length

    patch.setattr(SequenceLayout, "rewind", rewind)


@bug("a fork forgets the high water")
def _(patch: pytest.MonkeyPatch) -> None:
    original = BatchedLayout.add_fork

    def add_fork(self: BatchedLayout[MLXSequenceCache], member: MLXSequenceCache) -> int:
        member.layout._high_water = member.layout._length
        return original(self, member)

    patch.setattr(BatchedLayout, "add_fork", add_fork)


@bug("a rewind does not reach the layers")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MLXSequenceCache, "_settle", lambda *_: None)


@bug("forks cost no capacity")
def _(patch: pytest.MonkeyPatch) -> None:
    used = property(lambda self: max(self.now.lengths.values(), default=0))
    patch.setattr(BatchedLayout, "used", used)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError, KeyError, pytest.fail.Exception)):
        run_all()


def test_the_schedules_that_notice_bugs_pass_without_one() -> None:
    run_all()
