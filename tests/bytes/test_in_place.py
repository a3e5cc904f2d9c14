"""A step writes into the pool's own memory: it allocates next to nothing, whatever the capacity.

Memory is measured, not time. Holding an array that was answered costs a copy, never its contents.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.facts.config import CacheConfig
from tests.support.arrays import raw
from tests.support.sequence_oracle import FORMS, Session, Shape, make_cache, simple_geometry

pytestmark = pytest.mark.usefixtures("collected")

HEADS, DIM, ROWS = 8, 128, 8192
#: Bytes of the keys of the large pool; its values are as large.
HALF = HEADS * DIM * ROWS * 4
SMALL = HALF // 32


def large_cache(form: str, ring: bool) -> MLXSequenceCache:
    """A pool of 64 MiB: flat and nearly full, or a ring that has wrapped."""
    geometry = simple_geometry(ROWS - 63 if ring else 0, kv_heads=HEADS, key_dim=DIM, value_dim=DIM)
    cache = make_cache(geometry, CacheConfig(ROWS * 4, initial_capacity=ROWS), form)
    for _ in range(ROWS // 512 + 1 if ring else ROWS // 512 - 1):
        step(cache, 512, ask=False)
        mx.eval(cache.state)
    assert cache.nbytes == 2 * HALF
    return cache


def step(cache: MLXSequenceCache, count: int, ask: bool) -> tuple[mx.array, mx.array]:
    rows = mx.ones((1, HEADS, count, DIM))
    if ask:
        cache.layer(0).make_mask(count)
    return cache.layer(0).update_and_fetch(rows, rows)


def allocated_by(cache: MLXSequenceCache, count: int) -> int:
    """The most bytes held at once during a step of `count` tokens, beyond those before it."""
    mx.eval(cache.state)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    answer = step(cache, count, ask=True)
    mx.eval(answer, cache.state)
    mx.synchronize()
    del answer
    return max(mx.get_peak_memory(), before) - before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ring", [False, True], ids=["flat", "ring"])
def test_a_step_does_not_copy_the_pool(form: str, ring: bool) -> None:
    cache = large_cache(form, ring)
    for count in (1, 1, 1, 16, 16, 1, 1):
        # The new rows themselves are T * 4 KiB, twice.
        assert allocated_by(cache, count) < SMALL
    mx.eval(cache.state)
    before = mx.get_active_memory()
    for _ in range(20):
        mx.eval(step(cache, 1, ask=True))
    assert mx.get_active_memory() - before < SMALL

    # The measure does see a copy: somebody who holds the pool's array makes the write copy it.
    held = cache.layers[0].keys
    assert allocated_by(cache, 1) > 0.9 * HALF
    del held


@pytest.mark.parametrize("form", FORMS)
def test_steps_that_are_evaluated_late_do_not_copy_either(form: str) -> None:
    cache = large_cache(form, ring=False)
    mx.eval(cache.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(8):
        step(cache, 1, ask=False)
    mx.eval(cache.state)
    assert mx.get_peak_memory() - before < SMALL


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_is_read_again_is_still_written_in_place(form: str) -> None:
    cache = large_cache(form, ring=True)
    for _ in range(3):
        allocated = allocated_by(cache, 1)
        mx.eval(cache.layers[0].keys_and_values())
        assert allocated < SMALL


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 3)])
@pytest.mark.parametrize("late", [False, True], ids=["evaluated", "lazy"])
def test_an_array_that_was_answered_never_changes(windows: tuple[int, ...], late: bool) -> None:
    """Slices, whole pools and whole rings, through steps, growth, rewinds and clears."""
    from tests.support.sequence_oracle import Question

    run = Session([Shape(window) for window in windows], initial_capacity=2)
    held: list[tuple[mx.array, object]] = []
    whole = 0
    for number in range(24):
        count = (1, 1, 1, 2, 7)[number % 5]
        for layer, cache in ((layer, cache) for cache in run.caches for layer in run.layers):
            if cache.length:
                answer = cache.layers[layer].keys_and_values()
                whole += answer[0].shape[2] == cache.layers[layer].rows
                held += [(array, raw(array)) for array in answer]
        run.step(count, [Question()] * len(windows))
        if not late:
            run.flush()
        if number == 15:
            run.rewind(run.length - 1)
    run.clear()
    run.step(9)
    run.flush()
    assert whole > 0
    assert len(held) > 40
    for array, contents in held:
        assert raw(array) == contents
