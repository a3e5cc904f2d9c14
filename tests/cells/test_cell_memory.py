"""Forks copy nothing, steps write in place, memory comes back: measured, not timed."""

from __future__ import annotations

import gc
import time
import weakref

import mlx.core as mx
import pytest

from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from tests.support.arrays import raw

pytestmark = pytest.mark.usefixtures("collected")

HEADS, DIM, LAYERS = 2, 64, 4
MEGABYTE = 2**20
#: Bytes of one cell: keys and values of all layers.
CELL = LAYERS * HEADS * DIM * 2 * 4


def make(capacity: int = 8192, initial: int = 512) -> MLXCellCache:
    layer = LayerGeometry(LayerPolicy.flat(), HEADS, DIM, DIM)
    windowed = LayerGeometry(LayerPolicy.ring(256), HEADS, DIM, DIM)
    return MLXCellCache(
        CacheGeometry((layer, windowed) * (LAYERS // 2)), CacheConfig(capacity, None, initial)
    )


def step(cache: MLXCellCache, spans: list[tuple[int, int]]) -> list[mx.array]:
    tokens = cache.declare_step(spans).tokens
    rows = mx.ones((1, HEADS, tokens, DIM))
    return [cache.attend(layer, rows, rows, rows, 1.0) for layer in range(LAYERS)]


def run(cache: MLXCellCache, spans: list[tuple[int, int]]) -> None:
    mx.eval(step(cache, spans), cache.state)
    mx.synchronize()


def active() -> int:
    mx.synchronize()
    return mx.get_active_memory()


def session_of(cache: MLXCellCache, length: int) -> int:
    sequence = cache.new()
    rows = mx.ones((1, HEADS, 512, DIM))
    for _ in range(length // 512):
        cache.declare_step([(sequence, 512)])
        for layer in range(LAYERS):
            cache.update_and_fetch(layer, rows, rows)
        mx.eval(cache.state)
    return sequence


def test_a_fork_of_4096_tokens_takes_no_memory_and_no_time() -> None:
    cache = make()
    origin = session_of(cache, 4096)
    pools = [id(array) for array in cache.state]
    contents = [raw(array) for array in cache.state]
    before, used, nbytes = active(), cache.used, cache.nbytes
    mx.reset_peak_memory()
    times = []
    for up_to in [None, 4096, 4095, 1000] * 5:
        start = time.perf_counter()
        cache.fork(origin, up_to)
        times.append(time.perf_counter() - start)
    assert active() <= before
    assert mx.get_peak_memory() == 0
    assert (cache.used, cache.nbytes) == (used, nbytes)
    assert [id(array) for array in cache.state] == pools
    assert [raw(array) for array in cache.state] == contents
    assert min(times[::4]) < 1e-3, f"the best fork took {min(times[::4]) * 1e3:.2f} ms"


def test_32_sequences_hold_their_common_prefix_once() -> None:
    cache = make(2048, 1024)
    origin = session_of(cache, 512)
    before = active()
    sequences = [origin, *(cache.fork(origin) for _ in range(31))]
    assert cache.used == 512
    for _ in range(4):
        run(cache, [(sequence, 1) for sequence in sequences])
    assert cache.used == 512 + 4 * 32
    assert cache.nbytes == 1024 * CELL
    # Between steps nothing is alive but the pools and the masks of the last step.
    assert active() - before < MEGABYTE // 4
    for sequence in sequences[1:]:
        cache.remove(sequence)
    assert cache.used == 516
    assert [cache.layout.owners(cell) for cell in range(512)] == [(origin,)] * 512


@pytest.mark.parametrize("form", ["array", "integer"])
def test_a_step_writes_in_place(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_KVCACHE_START", form)
    cache = make(initial=8192)
    sequences = [session_of(cache, 512) for _ in range(6)]
    for sequence in sequences[::2]:
        cache.rewind(sequence, 510)
    pool = cache.nbytes // LAYERS // 2
    kinds = set()
    for count in (1, 1, 1, 8, 1):
        # The holes that sequences left behind are filled first: rows that are not neighbors.
        spans = [(sequence, count) for sequence in sequences]
        tokens = len(sequences) * count
        rows = mx.ones((1, HEADS, tokens, DIM))
        mx.eval(cache.state, rows)
        before = active()
        mx.reset_peak_memory()
        cache.declare_step(spans)
        for layer in range(LAYERS):
            keys, values = cache.update_and_fetch(layer, rows, rows)
            mx.eval(cache.state)
            del keys, values
        kinds.add(cache._running.placement.cells is None)
        assert max(mx.get_peak_memory(), before) - before < pool // 8
    assert kinds == {True, False}, "both ways of writing were to be measured"

    # The measure does see a copy: somebody holds the pools.
    held = cache.state
    before = active()
    run(cache, [(sequences[0], 1)])
    assert active() - before > pool
    del held


def test_defragmentation_gives_memory_back() -> None:
    cache = make()
    baseline = active()
    sequences = [session_of(cache, 1024) for _ in range(4)]
    assert cache.nbytes == 4096 * CELL
    for sequence in sequences[:3]:
        cache.remove(sequence)
    assert cache.nbytes == 4096 * CELL
    pool = cache.nbytes // LAYERS
    before = active()
    mx.reset_peak_memory()
    assert cache.defragment() == 1024
    assert mx.get_peak_memory() - before < pool, "pools are moved one after the other"
    assert cache.nbytes == 1024 * CELL
    assert active() - baseline < 1024 * CELL + MEGABYTE
    cache.remove(sequences[3])
    assert cache.defragment() == 0
    assert cache.nbytes == 0
    assert active() - baseline < MEGABYTE // 4
    run(cache, [(cache.new(), 3)])
    assert cache.nbytes == 512 * CELL


def test_a_dropped_cache_frees_its_pools_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        before = active()
        cache = make()
        origin = session_of(cache, 512)
        run(cache, [(origin, 1), (cache.fork(origin), 1)])
        watched = weakref.ref(cache)
        del cache
        assert watched() is None
        assert active() - before < MEGABYTE // 16
    finally:
        gc.enable()


def test_forks_that_come_and_go_leave_nothing() -> None:
    cache = make(2048)
    origin = session_of(cache, 512)
    run(cache, [(cache.fork(origin), 1)])
    cache.remove(1)
    before, used = active(), cache.used
    for _ in range(40):
        twins = [cache.fork(origin, 500) for _ in range(3)]
        run(cache, [(twin, 2) for twin in twins])
        for twin in twins:
            cache.remove(twin)
    assert (cache.used, cache.used_end) == (used, used)
    assert active() - before < MEGABYTE // 4


def test_a_declaration_drops_the_masks_of_the_step_before() -> None:
    cache = make(initial=8192)
    first, second = session_of(cache, 2048), session_of(cache, 2048)
    before = active()
    run(cache, [(first, 1024), (second, 1024)])
    masks = active() - before
    assert masks > 2 * 2048 * 4096, "the masks of both windows were to be measured"
    cache.declare_step([(first, 1)])
    assert active() - before < MEGABYTE
