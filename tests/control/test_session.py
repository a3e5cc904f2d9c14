"""The session: who owns a key, and that nothing a user does leaves one behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from mlx_kvcache import (
    FACTORY,
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
    ConfigError,
    FaceError,
    KVCacheError,
    NoActiveCacheError,
    SessionError,
)
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from tests.support.plain_cache import CONFIG, GEOMETRY, PlainCache, plain
from tests.support.session_steps import write

PLAIN = CacheFactory({("mlx", "sequence"): PlainCache})


def test_the_errors_are_also_the_builtins_that_a_user_expects() -> None:
    for error, builtin in [(SessionError, RuntimeError), (FaceError, TypeError)]:
        assert issubclass(error, KVCacheError)
        assert issubclass(error, builtin)


def test_in_the_body_the_cache_is_installed_and_active_and_after_it_neither() -> None:
    with CacheSession(GEOMETRY, CONFIG) as session:
        cache = session.cache
        assert type(cache) is MLXSequenceCache
        assert (cache.geometry, cache.config) == (GEOMETRY, CONFIG)
        assert REGISTRY.keys() == (session.key,)
        assert REGISTRY.get(session.key) is cache is current_cache()
        assert session.is_open
    assert not session.is_open
    assert REGISTRY.keys() == ()
    with pytest.raises(NoActiveCacheError):
        current_cache()
    with pytest.raises(CacheKeyError):
        REGISTRY.get(session.key)


def test_the_config_may_be_left_out() -> None:
    with CacheSession(GEOMETRY) as session:
        assert session.cache.config == CacheConfig()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_body_comes_through_and_the_key_is_erased(
    error: type[BaseException],
) -> None:
    session = CacheSession(GEOMETRY, CONFIG)

    def body() -> None:
        with session:
            assert current_cache() is session.cache
            raise error

    with pytest.raises(error):
        body()
    assert REGISTRY.keys() == ()
    assert not session.is_open
    with pytest.raises(NoActiveCacheError):
        current_cache()


def test_a_closed_session_holds_its_cache_no_longer() -> None:
    for closing in (lambda session: session.close(), lambda session: session.__exit__(*[None] * 3)):
        session = CacheSession(GEOMETRY, CONFIG, factory=PLAIN).open()
        alive = weakref.ref(session.cache)
        assert alive() is not None
        closing(session)
        assert alive() is None


def test_open_and_close_do_without_a_with_body() -> None:
    session = CacheSession(GEOMETRY, CONFIG)
    assert not session.is_open
    assert session.open() is session
    cache, key = session.cache, session.key
    assert REGISTRY.get(key) is cache
    with pytest.raises(NoActiveCacheError):
        current_cache()
    assert session.open() is session
    assert (session.cache, session.key, REGISTRY.keys()) == (cache, key, (key,))
    with session:
        assert current_cache() is cache
        assert REGISTRY.keys() == (key,)
    assert REGISTRY.keys() == ()


def test_close_may_be_repeated_and_erases_no_other_key() -> None:
    session = CacheSession(GEOMETRY, CONFIG).open()
    session.close()
    with CacheSession(GEOMETRY, CONFIG) as other:
        session.close()
        session.__exit__(None, None, None)
        assert REGISTRY.keys() == (other.key,)
        assert current_cache() is other.cache


def test_a_closed_session_stays_closed() -> None:
    never_opened = CacheSession(GEOMETRY, CONFIG)
    never_opened.close()
    opened = CacheSession(GEOMETRY, CONFIG).open()
    opened.close()
    entered = CacheSession(GEOMETRY, CONFIG)
    with entered:
        pass
    around = CacheSession.around(plain())
    with around:
        pass
    for session in (never_opened, opened, entered, around):
        for again in (session.open, session.__enter__):
            with pytest.raises(SessionError, match="cannot be opened again"):
                again()
        for part in ("cache", "control"):
            with pytest.raises(SessionError, match="holds no cache"):
                getattr(session, part)
        assert "closed" in repr(session)
        assert REGISTRY.keys() == ()


def test_before_it_is_open_a_session_has_no_key_and_no_cache() -> None:
    session = CacheSession(GEOMETRY, CONFIG)
    with pytest.raises(SessionError, match="no key yet"):
        _ = session.key
    with pytest.raises(SessionError, match="holds no cache; open or enter"):
        _ = session.cache
    assert "not yet open" in repr(session)


def test_closed_in_its_own_body_the_cache_stays_active_to_the_end() -> None:
    with CacheSession(GEOMETRY, CONFIG) as session:
        cache = session.cache
        session.close()
        assert REGISTRY.keys() == ()
        assert current_cache() is cache


def test_a_session_cannot_be_entered_twice() -> None:
    with CacheSession(GEOMETRY, CONFIG) as session:
        with pytest.raises(SessionError, match="entered already"), session:
            pytest.fail("the body ran")
        assert session.is_open
        assert current_cache() is session.cache


def test_a_dropped_session_gives_its_key_back() -> None:
    session = CacheSession(GEOMETRY, CONFIG).open()
    other = CacheSession(GEOMETRY, CONFIG).open()
    assert REGISTRY.keys() == (session.key, other.key)
    del session
    gc.collect()
    assert REGISTRY.keys() == (other.key,)
    other.close()


class NoMemoryError(Exception):
    pass


def failing(times: int) -> Callable[[CacheGeometry, CacheConfig], PlainCache]:
    left = [times]

    def builder(geometry: CacheGeometry, config: CacheConfig) -> PlainCache:
        if left[0]:
            left[0] -= 1
            raise NoMemoryError("no memory")
        return PlainCache(geometry, config)

    return builder


@pytest.mark.parametrize("within", ["open", "__enter__"])
def test_a_builder_that_raises_leaves_nothing_behind(within: str) -> None:
    factory = CacheFactory({("mlx", "sequence"): failing(1)})
    registry = CacheRegistry()
    with CacheSession.around(plain(), registry=registry) as outer:
        session = CacheSession(GEOMETRY, CONFIG, factory=factory, registry=registry)
        with pytest.raises(NoMemoryError, match="no memory"):
            getattr(session, within)()
        assert registry.keys() == (outer.key,)
        assert current_cache() is outer.cache
        assert not session.is_open
        for part in ("key", "cache"):
            with pytest.raises(SessionError):
                getattr(session, part)
        # The key that was never used is not lost either, and the session can be tried again.
        with session:
            assert registry.keys() == ("cache-1", "cache-2") == (outer.key, session.key)
            assert current_cache() is session.cache


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kind": "paged"}, CacheKindError),
        ({"backend": "acme"}, CacheKindError),
        ({"config": CacheConfig(capacity=0)}, ConfigError),
        ({"geometry": None}, KVCacheError),
    ],
)
def test_what_the_factory_refuses_leaves_nothing_behind(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    session = CacheSession(**{"geometry": GEOMETRY, "config": CONFIG, **arguments})
    with pytest.raises(error), session:
        pytest.fail("the body ran")
    assert REGISTRY.keys() == ()
    assert not session.is_open


def test_other_kinds_and_factories() -> None:
    factory = CacheFactory({("acme", "paged"): PlainCache})
    with CacheSession(GEOMETRY, CONFIG, backend="acme", kind="paged", factory=factory) as session:
        assert type(session.cache) is PlainCache
        with pytest.raises(FaceError, match="PlainCache does not hold one sequence"):
            _ = session.control
    assert ("acme", "paged") not in FACTORY.kinds()


def test_a_session_around_a_cache_that_exists() -> None:
    cache = MLXSequenceCache(GEOMETRY, CONFIG)
    write(cache, 1.0, 4)
    with CacheSession.around(cache) as first, CacheSession.around(cache) as second:
        assert first.cache is second.cache is cache is current_cache()
        assert first.key != second.key
        assert first.control.length == 4
    assert cache.length == 4
    write(cache, 1.0)
    assert cache.length == 5


@pytest.mark.parametrize("thing", [None, "cache-1", GEOMETRY, MLXSequenceCache, object()])
def test_only_a_cache_is_taken(thing: Any) -> None:
    with pytest.raises(FaceError, match="a session takes a cache"):
        CacheSession.around(thing)
    assert REGISTRY.keys() == ()
