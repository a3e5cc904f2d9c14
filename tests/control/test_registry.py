"""The registry and the active cache: by key, by thread, by task, by with-body."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_kvcache import REGISTRY, CacheRegistry, CacheSession, current_cache
from mlx_kvcache.control.protocols import Cache
from mlx_kvcache.errors import CacheKeyError, KVCacheError, NoActiveCacheError
from tests.support.plain_cache import PlainCache, plain
from tests.support.session_steps import run_all


@pytest.fixture
def registry() -> CacheRegistry:
    return CacheRegistry()


def test_the_errors_are_also_the_builtins_that_a_user_expects() -> None:
    for error, builtin in [(CacheKeyError, KeyError), (NoActiveCacheError, RuntimeError)]:
        assert issubclass(error, KVCacheError)
        assert issubclass(error, builtin)


def test_a_key_leads_to_its_cache_while_the_session_is_open(registry: CacheRegistry) -> None:
    first, second = plain(), plain()
    with CacheSession.around(first, registry=registry) as outer:
        with CacheSession.around(second, registry=registry) as inner:
            assert registry.keys() == (outer.key, inner.key) == ("cache-1", "cache-2")
            assert registry.get("cache-1") is first
            assert registry.get("cache-2") is second
        assert registry.keys() == ("cache-1",)
        with pytest.raises(CacheKeyError):
            registry.get("cache-2")
    assert registry.keys() == ()


@pytest.mark.parametrize("key", ["cache-9", "", None, 1, ["cache-1"]])
def test_an_unknown_key_names_those_that_exist(registry: CacheRegistry, key: Any) -> None:
    with pytest.raises(CacheKeyError, match="there are: none"):
        registry.get(key)
    with (
        CacheSession.around(plain(), registry=registry),
        CacheSession.around(plain(), registry=registry),
    ):
        for look in (registry.get, lambda each: registry.active(each).__enter__()):
            with pytest.raises(CacheKeyError, match=r"there are: cache-1, cache-2\.") as caught:
                look(key)
            # Not the repr of the message, which is what a bare KeyError prints.
            assert str(caught.value).startswith(f"no cache is installed under {key!r}")
        assert registry.current() is registry.get("cache-2")


def test_many_keys_are_shortened_in_the_message(registry: CacheRegistry) -> None:
    sessions = [CacheSession.around(plain(), registry=registry).open() for _ in range(20)]
    with pytest.raises(CacheKeyError, match=r"cache-7, cache-8 and 12 more\."):
        registry.get("nothing")
    sessions.pop().close()
    with pytest.raises(CacheKeyError, match=r"cache-7, cache-8 and 11 more\."):
        registry.get("nothing")


def test_there_is_no_public_way_in_or_out_but_a_session() -> None:
    public = {name for name in dir(CacheRegistry) if not name.startswith("_")}
    assert public == {"get", "keys", "active", "current"}


def test_keys_are_never_minted_twice(registry: CacheRegistry) -> None:
    keys: list[str] = []

    def mint() -> None:
        for _ in range(200):
            with CacheSession.around(plain(), registry=registry) as session:
                keys.append(session.key)

    run_all([mint] * 4)
    assert len(set(keys)) == len(keys) == 800
    assert registry.keys() == ()


def test_registries_do_not_see_each_other(registry: CacheRegistry) -> None:
    with CacheSession.around(plain(), registry=registry) as session:
        assert registry.keys() == (session.key,)
        assert CacheRegistry().keys() == REGISTRY.keys() == ()
        # What is active is so for the thread, wherever it is installed.
        assert REGISTRY.current() is registry.current() is current_cache() is session.cache


def test_without_an_active_cache_the_question_is_refused(registry: CacheRegistry) -> None:
    with pytest.raises(NoActiveCacheError, match="no cache is active"):
        current_cache()
    session = CacheSession.around(plain(), registry=registry).open()
    with pytest.raises(NoActiveCacheError):
        registry.current()
    with registry.active(session.key) as cache:
        assert registry.current() is cache is session.cache
    with pytest.raises(NoActiveCacheError):
        registry.current()


def test_active_restores_the_previous_one_also_after_an_exception(registry: CacheRegistry) -> None:
    first = CacheSession.around(plain(), registry=registry).open()
    second = CacheSession.around(plain(), registry=registry).open()
    seen: list[Cache] = []

    def fail_within(key: str) -> None:
        with registry.active(key):
            seen.append(current_cache())
            raise ZeroDivisionError

    with registry.active(first.key):
        seen.append(current_cache())
        with pytest.raises(ZeroDivisionError):
            fail_within(second.key)
        seen.append(current_cache())
        with registry.active(first.key):
            seen.append(current_cache())
        seen.append(current_cache())
    assert seen == [first.cache, second.cache, first.cache, first.cache, first.cache]


def test_a_refused_activation_leaves_the_active_cache(registry: CacheRegistry) -> None:
    with CacheSession.around(plain(), registry=registry) as session:
        with pytest.raises(CacheKeyError), registry.active("cache-99"):
            pytest.fail("the body ran")
        assert current_cache() is session.cache


def test_the_active_cache_is_the_threads_own(registry: CacheRegistry) -> None:
    barrier = threading.Barrier(2, timeout=30)
    seen: dict[int, list[Cache]] = {0: [], 1: []}
    mine = [plain(), plain()]

    def work(number: int) -> None:
        with pytest.raises(NoActiveCacheError):
            current_cache()
        with CacheSession.around(mine[number], registry=registry):
            for _ in range(50):
                barrier.wait()
                seen[number].append(current_cache())
        with pytest.raises(NoActiveCacheError):
            current_cache()

    with CacheSession.around(plain(), registry=registry) as outside:
        run_all([lambda: work(0), lambda: work(1)])
        assert current_cache() is outside.cache
    assert seen == {0: [mine[0]] * 50, 1: [mine[1]] * 50}
    assert mine[0] is not mine[1]


def test_two_threads_may_have_one_cache_active(registry: CacheRegistry) -> None:
    seen: list[Cache] = []
    barrier = threading.Barrier(2, timeout=30)
    session = CacheSession.around(plain(), registry=registry).open()

    def work() -> None:
        with registry.active(session.key):
            barrier.wait()
            seen.append(current_cache())

    run_all([work, work])
    assert seen == [session.cache, session.cache]


def test_tasks_do_not_mix(registry: CacheRegistry) -> None:
    seen: dict[int, list[bool]] = {0: [], 1: [], 2: []}

    async def work(number: int) -> None:
        with CacheSession.around(plain(), registry=registry) as session:
            for _ in range(10):
                await asyncio.sleep(0)
                seen[number].append(current_cache() is session.cache)

    async def main() -> None:
        await asyncio.gather(*(work(number) for number in seen))

    asyncio.run(main())
    assert seen == {number: [True] * 10 for number in range(3)}


def test_a_task_that_outlives_the_body_has_no_active_cache(registry: CacheRegistry) -> None:
    """Neither the closed session's, which it inherited, nor that of the session around it."""

    async def main() -> weakref.ref[PlainCache]:
        ended = asyncio.Event()
        began = asyncio.Event()

        async def background(expected: weakref.ref[PlainCache]) -> None:
            assert current_cache() is expected()
            began.set()
            await ended.wait()
            with pytest.raises(NoActiveCacheError, match="cache-2, is so no longer"):
                current_cache()
            with CacheSession.around(plain(), registry=registry) as own:
                assert current_cache() is own.cache

        with CacheSession.around(plain(), registry=registry) as outer:
            cache = plain()
            held = weakref.ref(cache)
            with CacheSession.around(cache, registry=registry):
                task = asyncio.create_task(background(held))
                await began.wait()
            del cache
            assert current_cache() is outer.cache
            # The suspended task does not keep the arrays of a closed session alive.
            gc.collect()
            assert held() is None
            ended.set()
            await task
            assert current_cache() is outer.cache
        return held

    assert asyncio.run(main())() is None


def test_bodies_that_end_in_another_order_than_they_began(registry: CacheRegistry) -> None:
    def hold(cache: PlainCache) -> Iterator[None]:
        with CacheSession.around(cache, registry=registry):
            yield

    caches = [plain(), plain(), plain()]
    holders = [hold(cache) for cache in caches]
    for holder in holders:
        next(holder)
    assert current_cache() is caches[2]
    next(holders[0], None)
    assert current_cache() is caches[2]
    next(holders[2], None)
    assert current_cache() is caches[1]
    next(holders[1], None)
    with pytest.raises(NoActiveCacheError, match="no cache is active"):
        current_cache()


def test_a_body_that_ends_in_another_context(registry: CacheRegistry) -> None:
    session = CacheSession.around(plain(), registry=registry)
    elsewhere = contextvars.Context()
    elsewhere.run(session.__enter__)
    assert elsewhere.run(current_cache) is session.cache
    with CacheSession.around(plain(), registry=registry) as here:
        session.__exit__(None, None, None)
        assert current_cache() is here.cache
        assert registry.keys() == (here.key,)
    with pytest.raises(NoActiveCacheError, match="is so no longer"):
        elsewhere.run(current_cache)
