"""The factory: pairs, insertion only, checks before and after the builder."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mlx_kvcache import FACTORY, MLXSequenceCache
from mlx_kvcache.control.factory import MLX, SEQUENCE, CacheFactory
from mlx_kvcache.errors import (
    BuilderError,
    CacheKindError,
    ConfigError,
    GeometryError,
    KVCacheError,
    RegistrationError,
)
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from tests.support.plain_cache import CONFIG, GEOMETRY, PlainCache


def test_the_errors_are_also_the_builtins_that_a_user_expects() -> None:
    for error, builtin in [
        (RegistrationError, ValueError),
        (CacheKindError, KeyError),
        (BuilderError, RuntimeError),
    ]:
        assert issubclass(error, KVCacheError)
        assert issubclass(error, builtin)


def test_the_process_wide_factory_builds_the_sequence_cache() -> None:
    cache = FACTORY.build(MLX, SEQUENCE, GEOMETRY, CONFIG)
    assert type(cache) is MLXSequenceCache
    assert (cache.geometry, cache.config) == (GEOMETRY, CONFIG)
    assert FACTORY.build(MLX, SEQUENCE, GEOMETRY, CONFIG) is not cache
    assert FACTORY.build(MLX, SEQUENCE, GEOMETRY).config == CacheConfig()
    assert (MLX, SEQUENCE) in FACTORY.kinds()


def test_a_builder_gets_geometry_and_config_and_its_cache_comes_back() -> None:
    factory = CacheFactory()
    factory.register("acme", "paged", PlainCache)
    cache = factory.build("acme", "paged", GEOMETRY, CONFIG)
    assert type(cache) is PlainCache
    assert cache.geometry is GEOMETRY
    assert cache.config is CONFIG


def test_the_key_is_a_pair_and_not_a_joined_string() -> None:
    factory = CacheFactory()
    first, second = [], []
    factory.register("a.b", "c", lambda g, c: first.append(1) or PlainCache(g, c))
    factory.register("a", "b.c", lambda g, c: second.append(1) or PlainCache(g, c))
    factory.build("a", "b.c", GEOMETRY, CONFIG)
    assert (first, second) == ([], [1])
    assert factory.kinds() == (("a", "b.c"), ("a.b", "c"))


def test_a_taken_pair_is_refused_and_the_builder_kept() -> None:
    class Other(PlainCache):
        pass

    factory = CacheFactory()
    factory.register("acme", "paged", PlainCache)
    with pytest.raises(RegistrationError, match=r"acme/paged has a builder already"):
        factory.register("acme", "paged", Other)
    assert type(factory.build("acme", "paged", GEOMETRY, CONFIG)) is PlainCache
    factory.register("acme", "other", Other)
    assert type(factory.build("acme", "other", GEOMETRY, CONFIG)) is Other


@pytest.mark.parametrize("builder", [None, 3, "module:name", PlainCache(GEOMETRY, CONFIG)])
def test_a_builder_that_cannot_be_called_is_refused(builder: Any) -> None:
    factory = CacheFactory({("acme", "paged"): PlainCache})
    for kind in ("paged", "new"):
        with pytest.raises(RegistrationError, match="must be callable"):
            factory.register("acme", kind, builder)
    assert factory.kinds() == (("acme", "paged"),)
    assert type(factory.build("acme", "paged", GEOMETRY, CONFIG)) is PlainCache


@pytest.mark.parametrize("name", ["", "a/b", " a", "a\n", "-a", None, 3])
def test_a_name_that_no_entry_point_could_carry_is_refused(name: Any) -> None:
    factory = CacheFactory()
    with pytest.raises(RegistrationError, match="a kind is named"):
        factory.register("acme", name, PlainCache)
    with pytest.raises(RegistrationError, match="a backend is named"):
        factory.register(name, "paged", PlainCache)
    assert factory.kinds() == ()


@pytest.mark.parametrize("pair", [("mlx", "paged"), ("acme", "sequence"), (["mlx"], "sequence")])
def test_an_unknown_kind_names_those_that_exist(pair: Any) -> None:
    factory = CacheFactory({("mlx", "sequence"): PlainCache, ("mlx", "cell"): PlainCache})
    with pytest.raises(CacheKindError, match=r"there are: mlx/cell, mlx/sequence\.") as caught:
        factory.build(*pair, GEOMETRY, CONFIG)
    assert f"{pair[0]}/{pair[1]}" in str(caught.value)
    assert "'" not in str(caught.value)[:5]
    with pytest.raises(CacheKindError, match="there are: none"):
        CacheFactory().build(*pair, GEOMETRY, CONFIG)


@pytest.mark.parametrize(
    ("geometry", "config", "error"),
    [
        (GEOMETRY, CacheConfig(capacity=0), ConfigError),
        (GEOMETRY, CacheConfig(capacity=8, kv_dtype="int4"), ConfigError),
        (GEOMETRY, {"capacity": 8}, ConfigError),
        (None, CONFIG, GeometryError),
        (GEOMETRY.layers, CONFIG, GeometryError),
    ],
)
def test_what_does_not_fit_together_never_reaches_a_builder(
    geometry: Any, config: Any, error: type[Exception]
) -> None:
    calls: list[CacheGeometry] = []

    def builder(geometry: CacheGeometry, config: CacheConfig) -> PlainCache:
        calls.append(geometry)
        return PlainCache(geometry, config)

    factory = CacheFactory({("acme", "paged"): builder})
    with pytest.raises(error):
        factory.build("acme", "paged", geometry, config)
    assert calls == []
    factory.build("acme", "paged", GEOMETRY, CONFIG)
    assert calls == [GEOMETRY]


@pytest.mark.parametrize(
    ("answer", "described"),
    [
        (None, "None"),
        (object(), "an object of type object"),
        ([], "an object of type list"),
        (type("Cache", (), dict.fromkeys(("geometry", "config", "capacity", "nbytes"))), "class"),
    ],
)
def test_an_answer_that_is_no_cache_is_refused(answer: Any, described: str) -> None:
    factory = CacheFactory({("acme", "paged"): lambda *_: answer})
    with pytest.raises(BuilderError, match=f"acme/paged answered with .*{described}"):
        factory.build("acme", "paged", GEOMETRY, CONFIG)


def test_what_a_builder_raises_passes_through() -> None:
    def builder(*_: object) -> PlainCache:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        CacheFactory({("acme", "paged"): builder}).build("acme", "paged", GEOMETRY, CONFIG)


def within(seconds: float, call: Any) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_builders_run_outside_the_lock() -> None:
    reached: list[bool] = []

    def builder(geometry: CacheGeometry, config: CacheConfig) -> PlainCache:
        # From another thread, for which a lock held here would be closed.
        reached.append(within(20, factory.kinds))
        factory.register("acme", f"more{len(reached)}", PlainCache)
        return PlainCache(geometry, config)

    factory = CacheFactory({("acme", "paged"): builder})
    factory.build("acme", "paged", GEOMETRY, CONFIG)
    assert reached == [True]
    assert factory.kinds() == (("acme", "more1"), ("acme", "paged"))
    # The probe does see a lock that is held.
    with factory._lock:
        assert not within(0.2, factory.kinds)


def test_of_many_threads_that_register_one_pair_one_wins() -> None:
    factory = CacheFactory()
    barrier = threading.Barrier(8)
    won: list[int] = []
    refused: list[int] = []

    def attempt(number: int) -> None:
        def mine(geometry: CacheGeometry, _: CacheConfig) -> PlainCache:
            return PlainCache(geometry, CacheConfig(number + 1))

        barrier.wait()
        try:
            factory.register("acme", "paged", mine)
            won.append(number)
        except RegistrationError:
            refused.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    assert factory.build("acme", "paged", GEOMETRY, CONFIG).capacity == won[0] + 1
