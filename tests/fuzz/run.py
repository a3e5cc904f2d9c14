"""Runs histories in this process: one by its seed, or several and what they leave behind."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_kvcache.control.registry import REGISTRY
from tests.fuzz.kinds import kind_named, kind_of
from tests.support.checked_writes import checked_writes

#: How often a failing history is run again, to find the verbs that it can do without.
SHRINKING_RUNS = 60


@dataclass
class Result:
    """What became of one history. failure: a traceback, None where nothing differs."""

    kind: str
    seed: int
    met: Counter[str]
    told: list[str] = field(default_factory=list)
    failure: str | None = None
    error: str = ""


def run_history(kind: str, seed: int, skip: Sequence[int] = ()) -> Result:
    """The history of a seed, but for the verbs of these numbers."""
    result = Result(kind, seed, Counter())
    try:
        history = kind_named(kind)(seed, result.met)
        result.told = history.told
        for index in range(history.length):
            if index not in skip:
                history.turn(index)
        history.end()
    except Exception as error:
        result.error = type(error).__name__
        result.failure = traceback.format_exc()
    return result


def shrunk(failed: Result) -> tuple[Result, tuple[int, ...]]:
    """A failing history without the verbs that its failure does not need, and their numbers."""
    best, skip = failed, ()
    reached = len(failed.told) - 1
    for index in reversed(range(reached)):
        if reached - index > SHRINKING_RUNS:
            break
        trial = (*skip, index)
        result = run_history(failed.kind, failed.seed, trial)
        if result.error == failed.error and len(result.told) < len(best.told):
            best, skip = result, trial
    return best, tuple(sorted(skip))


@dataclass
class Leaks:
    """What no history may leave behind: bytes that are alive, and keys of caches."""

    active: int | None = None

    def found(self, compiled: int = 0) -> str | None:
        """What was left behind since the first call, None for nothing.

        compiled: bytes that MLX may have kept since the last call, as constants of its functions.
        """
        gc.collect()
        mx.clear_cache()
        active = mx.get_active_memory()
        if self.active is None:
            self.active = active
        grown, self.active = active - self.active, max(active, self.active)
        if grown > compiled:
            return f"{grown} bytes of arrays are still alive"
        keys = REGISTRY.keys()
        return f"{len(keys)} caches are still installed" if keys else None


@contextmanager
def prepared(only: Sequence[str]) -> Iterator[None]:
    """With checked writes, and everything imported and made that histories share."""
    with checked_writes():
        for kind in only:
            kind_named(kind).prepare()
            for seed in range(4):
                run_history(kind, seed)
        gc.collect()
        gc.freeze()
        yield


def seeds_of(first: int, count: int, only: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Kind and seed of each of `count` histories from a seed on."""
    for seed in range(first, first + count):
        yield kind_of(seed, only), seed
