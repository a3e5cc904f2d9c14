"""Long random schedules from a seed, and bugs to plant that they must notice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import CapacityError, RewindError
from tests.support.many_sequences_driver import Driver


def run_schedule(driver: Driver[Any], operations: int, seed: int) -> Counter[str]:
    """Random operations with every check after each of them; answers what was met."""
    random = np.random.default_rng(seed)
    met: Counter[str] = Counter()
    for _ in range(operations):
        met[_operate(driver, random)] += 1
        driver.check()
    return met


def _operate(driver: Driver[Any], random: np.random.Generator) -> str:
    cache, truth = driver.cache, driver.truth
    if len(truth) < 2 or (len(truth) < 6 and random.random() < 0.1):
        driver.new()
        return "new"
    sequence = int(random.choice(sorted(truth)))
    chance = random.random()
    if chance < 0.6:
        return _step(driver, random)
    if chance < 0.72:
        length = int(random.integers(0, len(truth[sequence]) + 1))
        if not driver.reachable(sequence, length):
            driver.refused(RewindError, lambda: cache.fork(sequence, length))
            return "refused fork"
        if len(truth) == 6 or (length > cache.free and not isinstance(cache, MLXCellCache)):
            driver.remove(sequence)
            return "remove"
        driver.fork(sequence, length)
        return "fork"
    if chance < 0.84:
        length = len(truth[sequence]) - int(random.integers(0, min(5, len(truth[sequence]) + 1)))
        if not driver.reachable(sequence, length):
            driver.refused(RewindError, lambda: cache.rewind(sequence, length))
            return "refused rewind"
        driver.rewind(sequence, length)
        return "rewind"
    if chance < 0.94 or not isinstance(cache, MLXCellCache):
        driver.remove(sequence)
        return "remove"
    return "defragment" if cache.defragment() else "nothing to defragment"


def _step(driver: Driver[Any], random: np.random.Generator) -> str:
    sequences = sorted(driver.truth)
    if random.random() < 0.6:
        # A decode step of most of them, in any order.
        count = int(random.integers(1, len(sequences) + 1))
        spans = [(int(s), 1) for s in random.permutation(sequences)[:count]]
    else:
        spans = [
            (int(random.choice(sequences)), int(random.choice([1, 1, 2, 3, 9])))
            for _ in range(random.integers(1, 5))
        ]
    if sum(count for _, count in spans) > driver.room:
        driver.refused(CapacityError, lambda: driver.cache.declare_step(spans))
        longest = max(sequences, key=lambda s: len(driver.truth[s]))
        driver.remove(longest)
        return "refused step"
    driver.step(spans)
    return "step" if len(dict(spans)) == 1 else "step over several"
