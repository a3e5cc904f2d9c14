"""Random schedules over MLXBatchedSequenceCache: real rings, no row in the wrong sequence."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from tests.support.many_sequences_machine import SharedMachine

pytestmark = pytest.mark.slow


class BatchedMachine(SharedMachine):
    cache_class: ClassVar[type[Any]] = MLXBatchedSequenceCache
    met: ClassVar[Counter[str]] = Counter()


def test_random_schedules() -> None:
    BatchedMachine.met.clear()
    run_state_machine_as_test(
        BatchedMachine,
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
        "verb before a step",
        "interrupted, abandon",
        "interrupted, rewind",
        "interrupted, remove",
        "refused update",
        "refused step CapacityError",
    ):
        assert BatchedMachine.met[what] > 0, f"{what}: met {BatchedMachine.met[what]} times"
