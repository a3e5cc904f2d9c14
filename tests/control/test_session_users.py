"""Sessions under what users do: nested, in threads, closed early, ten thousand times."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from mlx_kvcache import (
    REGISTRY,
    CacheFactory,
    CacheRegistry,
    CacheSession,
    MLXSequenceCache,
    current_cache,
)
from mlx_kvcache.errors import (
    CacheKeyError,
    CacheKindError,
)
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from tests.support.plain_cache import CONFIG, GEOMETRY, PlainCache
from tests.support.session_steps import held, run_all, write


def test_nested_sessions_hand_back_to_the_outer_one() -> None:
    with CacheSession(GEOMETRY, CONFIG) as outer:
        outer_cache = outer.control
        assert isinstance(outer_cache, MLXSequenceCache)
        write(outer_cache, 1.0, 5)
        before = held(outer_cache)

        def body() -> None:
            with CacheSession(GEOMETRY, CONFIG) as inner:
                assert inner.key != outer.key
                assert current_cache() is inner.cache is not outer_cache
                assert isinstance(inner.cache, MLXSequenceCache)
                write(inner.cache, 9.0, 3)
                assert inner.control.length == 3
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            body()
        assert current_cache() is outer_cache
        assert REGISTRY.keys() == (outer.key,)
        assert (outer_cache.length, held(outer_cache)) == (5, before)
        write(outer_cache, 1.0)
        assert held(outer_cache) != before


def test_two_threads_each_with_a_session() -> None:
    turns = 12
    barrier = threading.Barrier(2, timeout=60)
    answers: dict[float, Any] = {}
    overlapped: list[int] = []

    def work(value: float) -> None:
        with CacheSession(GEOMETRY, CONFIG) as session:
            for _ in range(turns):
                barrier.wait()
                overlapped.append(len(REGISTRY.keys()))
                active = current_cache()
                assert active is session.cache
                assert isinstance(active, MLXSequenceCache)
                write(active, value)
                answers[value] = held(active)
            assert session.control.length == turns
            barrier.wait()

    run_all([lambda: work(100.0), lambda: work(200.0)])
    assert overlapped == [2] * (2 * turns)
    for value in (100.0, 200.0):
        alone = MLXSequenceCache(GEOMETRY, CONFIG)
        for _ in range(turns):
            write(alone, value)
        assert answers[value] == held(alone)
    assert answers[100.0] != answers[200.0]


def test_a_cache_outlives_its_session_for_whoever_holds_it() -> None:
    with CacheSession(GEOMETRY, CONFIG) as session:
        cache = session.control
        assert isinstance(cache, MLXSequenceCache)
        write(cache, 1.0, 6)
    never = MLXSequenceCache(GEOMETRY, CONFIG)
    write(never, 1.0, 6)
    for each in (cache, never):
        each.rewind(5)
        write(each, 2.0, 3)
    assert held(cache) == held(never)
    assert cache.length == 8
    write(never, 2.0)
    assert held(cache) != held(never)


def test_a_session_closed_while_another_thread_uses_its_cache() -> None:
    session = CacheSession(GEOMETRY, CONFIG).open()
    inside, closed = threading.Event(), threading.Event()
    answers: list[Any] = []

    def work() -> None:
        with REGISTRY.active(session.key) as cache:
            assert isinstance(cache, MLXSequenceCache)
            write(cache, 1.0, 2)
            inside.set()
            assert closed.wait(30)
            with pytest.raises(CacheKeyError):
                REGISTRY.get(session.key)
            assert current_cache() is cache
            write(cache, 1.0, 4)
            answers.append(held(cache))

    def close() -> None:
        assert inside.wait(30)
        session.close()
        closed.set()

    run_all([work, close])
    alone = MLXSequenceCache(GEOMETRY, CONFIG)
    write(alone, 1.0, 2)
    write(alone, 1.0, 4)
    assert answers == [held(alone)]


def test_opened_by_many_threads_a_session_builds_once() -> None:
    built: list[PlainCache] = []
    barrier = threading.Barrier(6, timeout=30)

    def builder(geometry: CacheGeometry, config: CacheConfig) -> PlainCache:
        built.append(PlainCache(geometry, config))
        return built[-1]

    registry = CacheRegistry()
    factory = CacheFactory({("mlx", "sequence"): builder})
    session = CacheSession(GEOMETRY, CONFIG, factory=factory, registry=registry)

    def work() -> None:
        barrier.wait()
        session.open()

    run_all([work] * 6)
    assert len(built) == 1
    assert registry.keys() == (session.key,)
    assert session.cache is built[0]
    run_all([session.close] * 6)
    assert registry.keys() == ()


CYCLES = 10_000


def cycle(number: int) -> None:
    try:
        with CacheSession(GEOMETRY, CONFIG) as outer:
            assert current_cache() is outer.cache
            if number % 4 == 0:
                CacheSession(GEOMETRY, CONFIG).open().close()
            if number % 4 == 1:
                with CacheSession(GEOMETRY, CONFIG, kind="nothing"):
                    pass
            if number % 4 == 2:
                raise ZeroDivisionError
            if number % 4 == 3:
                with CacheSession(GEOMETRY, CONFIG) as inner:
                    outer.close()
                    assert current_cache() is inner.cache
    except (CacheKindError, ZeroDivisionError):
        pass


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Objects and bytes that are there after `work` and were not before."""
    gc.collect()
    tracemalloc.start()
    objects, size = len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
    kept = work()
    gc.collect()
    grown = len(gc.get_objects()) - objects, tracemalloc.get_traced_memory()[0] - size
    tracemalloc.stop()
    del kept
    return grown


@pytest.mark.slow
def test_ten_thousand_cycles_leave_no_growth() -> None:
    for number in range(200):
        cycle(number)

    def all_cycles() -> None:
        for number in range(CYCLES):
            cycle(number)

    objects, size = measured(all_cycles)
    assert objects < 50
    assert size < 50_000
    assert REGISTRY.keys() == ()
    # The measure does see what stays: a hundred open sessions, a hundredth of the cycles.
    objects, size = measured(lambda: [CacheSession(GEOMETRY, CONFIG).open() for _ in range(100)])
    assert objects > 500
    assert size > 50_000
