"""Random schedules over MLXCellCache: no sequence ever sees another's rows, no cell is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from mlx_kvcache.cache.cells import MLXCellCache
from tests.support.many_sequences_machine import SharedMachine

pytestmark = pytest.mark.slow


class CellMachine(SharedMachine):
    cache_class: ClassVar[type[Any]] = MLXCellCache
    met: ClassVar[Counter[str]] = Counter()

    @rule()
    def defragment(self) -> None:
        cache = self.run.cache
        moved = cache.defragment()
        assert cache.used_end == cache.used
        self.met["defragment"] += 1
        self.met["defragment that moved rows"] += moved > 0
        assert cache.defragment() == 0


def test_random_schedules() -> None:
    CellMachine.met.clear()
    run_state_machine_as_test(
        CellMachine,
        settings=settings(
            settings.default,
            max_examples=settings.default.max_examples // 2,
            stateful_step_count=30,
        ),
    )
    # What is rarer may be missing from a run; the named tests hold each of them.
    for what in (
        "step",
        "step over several",
        "step with a sequence in two spans",
        "fork",
        "rewind",
        "remove",
        "defragment that moved rows",
        "verb before a step",
        "interrupted, rewind",
        "interrupted, remove",
        "refused update",
        "refused step CapacityError",
    ):
        assert CellMachine.met[what] > 0, f"{what}: met {CellMachine.met[what]} times"
