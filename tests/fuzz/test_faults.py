"""A short run of histories finds each of these planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mlx_kvcache.cache import layer, step
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.chat.conversation import Conversation
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.engine import Engine
from mlx_kvcache.integrations.mlx_lm import PromptCache
from mlx_kvcache.layout import RingLayout
from mlx_kvcache.layout.cells import CellLayout
from mlx_kvcache.store.rows import DenseRows
from tests.fuzz.history import History
from tests.fuzz.kinds import NAMES
from tests.fuzz.many import ManyHistory
from tests.fuzz.run import Leaks, Result, run_history, shrunk
from tests.support.checked_writes import checked_writes
from tests.support.interrupts import PACKAGE
from tests.support.plain_cache import CONFIG, GEOMETRY

pytestmark = pytest.mark.slow

#: More interrupts than a long run has, so that a short one meets the few lines that matter.
MANY_INTERRUPTS = 0.5


@pytest.fixture(scope="module", autouse=True)
def _writes_are_checked() -> Iterator[None]:
    with checked_writes():
        yield


def planted(source: str, **names: Any) -> Callable[..., Any]:
    """A function `fault` that can be interrupted as the package's own can."""
    exec(compile(source, PACKAGE + "planted.py", "exec"), names)
    fault: Callable[..., Any] = names["fault"]
    return fault


def _template_shifted(size: int, window: int) -> np.ndarray:
    return np.roll(original_template(size, window), 1, axis=1)


original_template = step.ring_template
original_floor = RingLayout.rewind_floor
COUNTS_AFTER_THE_OFFSET = """
def fault(self, keys, values):
    steps = self.steps
    self.store.write(Placement((Run(self.offset, 1),), (steps.start,)), keys, values)
    self.offset = steps.end
    # Points at which the interrupt may fall.
    for _ in range(20):
        pass
    self.sequence.unwritten -= 1
    return self.store.read((Run(0, steps.stop or self.store.rows),)).dense()
"""
WRITES_IN_PLACE = """
def fault(self):
    return self
"""

#: By name: the kind of history that must find it, in how many, and what is replaced by what.
FAULTS: dict[str, tuple[str, int, Any, str, Any]] = {
    "the ring's floor is one too low": (
        "sequence", 150, RingLayout, "rewind_floor",
        lambda self, high: max(0, original_floor(self, high) - 1),
    ),
    "the ring's floor is one too low, in integers": (
        "layout", 60, RingLayout, "rewind_floor",
        lambda self, high: max(0, original_floor(self, high) - 1),
    ),
    "a wrapped ring is read one row off": (
        "sequence", 60, step, "ring_template", _template_shifted,
    ),
    "a layer is counted after its offset": (
        "sequence", 400, layer.SequenceLayer, "_append_at",
        planted(COUNTS_AFTER_THE_OFFSET, Placement=layer.Placement, Run=layer.Run),
    ),
    "a snapshot shares what is written": (
        "sequence", 60, DenseRows, "copy", planted(WRITES_IN_PLACE),
    ),
    "cells leak when a verb is interrupted": (
        "cells", 200, CellLayout, "_mend", lambda self: setattr(self, "_is_torn", False),
    ),
    "a broken off move of cells is not finished": (
        "cells", 300, MLXCellCache, "_settled", lambda self: self.layout,
    ),
    "rows are not kept for a step that overwrites what its start needs": (
        "sequence", 150, layer, "keep", lambda *_: None,
    ),
    "recurrent states stay behind": (
        "prompt_cache", 60, PromptCache, "restore_recurrent", lambda *_: None,
    ),
    "an interrupted engine step is followed by the next": (
        "engine", 40, Engine, "_mend", lambda *_: None,
    ),
    "an interrupted turn stays half in": (
        "chat", 25, Conversation, "_align", lambda *_: None,
    ),
}  # fmt: skip


def first_failure(kind: str, histories: int) -> Result | None:
    for seed in range(histories):
        result = run_history(kind, seed)
        if result.failure is not None:
            return result
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, histories, owner, attribute, fault = FAULTS[name]
    monkeypatch.setattr(History, "interrupt_chance", MANY_INTERRUPTS)
    monkeypatch.setattr(owner, attribute, fault)
    result = first_failure(kind, histories)
    assert result is not None, f"{name}: not found in {histories} histories"


def test_a_history_that_fails_is_told_without_what_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "ring_template", _template_shifted)
    result = first_failure("sequence", 60)
    assert result is not None
    short, skip = shrunk(result)
    assert short.error == result.error == "AssertionError"
    assert skip
    assert len(short.told) < len(result.told)
    assert run_history("sequence", result.seed, skip).told == short.told
    monkeypatch.undo()
    assert run_history("sequence", result.seed, skip).failure is None


def test_what_is_left_behind_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = Leaks()
    assert leaks.found() is None
    for seed in range(3):
        run_history("cells", seed)
    assert leaks.found() is None
    kept: list[Any] = []
    end = ManyHistory.end
    monkeypatch.setattr(ManyHistory, "end", lambda self: (kept.append(self), end(self)))
    run_history("cells", 1)
    assert "bytes of arrays are still alive" in str(leaks.found())
    kept.clear()
    session = CacheSession(GEOMETRY, CONFIG).open()
    assert "1 caches are still installed" in str(leaks.found())
    session.close()


def test_a_seed_gives_the_same_history_again() -> None:
    for kind in NAMES:
        run_history(kind, 5)
        first, second = run_history(kind, 5), run_history(kind, 5)
        assert first.told == second.told
        assert first.met == second.met
        assert run_history(kind, 6).told != first.told


@pytest.mark.parametrize(
    ("kind", "histories"),
    [
        ("sequence", 60), ("cells", 40), ("batched", 30), ("prompt_cache", 30), ("layout", 40),
        ("engine", 6), ("chat", 4),
    ],
)  # fmt: skip
def test_a_short_run(kind: str, histories: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(histories):
        result = run_history(kind, seed)
        assert result.failure is None, f"seed {seed}: {result.told} {result.failure}"
        met.update(result.met)
    assert met["interrupts"] > histories // 3
    assert met["a ring wrapped"] > 0 or kind in ("engine", "chat")
