"""Every public method with values of every wrong kind: a typed error, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import KVCacheError, RewindError
from mlx_kvcache.facts.config import CacheConfig
from tests.support.many_sequences_driver import (
    GROUPS,
    HEADS,
    KEY_DIM,
    SCALE,
    VALUE_DIM,
    geometry_of,
    observe,
)
from tests.support.strange_values import STRANGE as VALUES

CACHES = [MLXCellCache, MLXBatchedSequenceCache]
STRANGE = {kind: value for kind, value in VALUES.items() if kind != "None"}


def made(cache_class: type[Any]) -> Any:
    """A cache that holds three positions of sequence 0."""
    cache = cache_class(geometry_of((0, 3)), CacheConfig(40, None, 2, 2))
    cache.new()
    step(cache, 3)
    return cache


def step(cache: Any, tokens: int) -> None:
    cache.declare_step([(0, tokens)])
    for layer in range(2):
        mx.eval(cache.attend(layer, **rows(tokens)))


def rows(tokens: int) -> dict[str, Any]:
    return {
        "queries": mx.ones((1, HEADS * GROUPS, tokens, KEY_DIM)),
        "keys": mx.ones((1, HEADS, tokens, KEY_DIM)),
        "values": mx.ones((1, HEADS, tokens, VALUE_DIM)),
        "scale": SCALE,
    }


def refused(cache: Any, call: Callable[[], object]) -> None:
    before = observe(cache)
    with pytest.raises(KVCacheError):
        call()
    assert observe(cache) == before


def verbs(cache: Any) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Calls of one argument that no value of `VALUES` is right for."""
    yield "position", cache.position
    yield "fork", cache.fork
    yield "remove", cache.remove
    yield "rewind", lambda value: cache.rewind(value, 0)
    yield "rewind to", lambda value: cache.rewind(0, value)
    yield "declare_step", cache.declare_step
    yield "declare_step of a span", lambda value: cache.declare_step([value])
    yield "declare_step of a sequence", lambda value: cache.declare_step([(value, 1)])
    yield "declare_step of tokens", lambda value: cache.declare_step([(0, value)])
    yield "declare_step at", lambda value: cache.declare_step([(0, 2)], [value, 4])
    yield "make_mask", cache.make_mask
    yield "restore", cache.restore
    if isinstance(cache, MLXCellCache):
        yield "reserve", cache.reserve
        yield "pool", cache.pool
        yield "cell_map", cache.cell_map
    else:
        yield "sequence", cache.sequence
        yield "rewind_floor", cache.rewind_floor


@pytest.mark.parametrize("cache_class", CACHES)
@pytest.mark.parametrize("kind", VALUES)
def test_verbs(cache_class: type[Any], kind: str) -> None:
    cache = made(cache_class)
    value = VALUES[kind]
    if kind == "a bool":
        # A declaration that counts True as a position would be found by it.
        cache.rewind(0, 1)
    for name, call in verbs(cache):
        if (name, kind) != ("cell_map", "a large number"):
            refused(cache, lambda call=call: call(value))
    if value is not None:
        refused(cache, lambda: cache.fork(0, value))
        refused(cache, lambda: cache.declare_step([(0, 2)], value))
    step(cache, 2)


@pytest.mark.parametrize("cache_class", CACHES)
@pytest.mark.parametrize("kind", STRANGE)
def test_steps(cache_class: type[Any], kind: str) -> None:
    cache = made(cache_class)
    value = STRANGE[kind]
    cache.declare_step([(0, 2)])
    refused(cache, lambda: cache.attend(value, **rows(2)))
    refused(cache, lambda: cache.update_and_fetch(value, rows(2)["keys"], rows(2)["values"]))
    refused(cache, lambda: cache.attend_again(value, rows(2)["queries"], SCALE))
    for name in (
        "queries",
        "keys",
        "values",
        "scale",
        "sinks",
        "softcap",
        "out_dtype",
        "positions",
    ):
        if name == "scale" and kind in {"a negative number", "a float", "a numpy number"}:
            continue
        if name == "scale" and kind == "a large number":
            continue
        if name == "softcap" and kind in {"a float", "a large number", "a numpy number"}:
            continue
        refused(cache, lambda name=name: cache.attend(0, **{**rows(2), name: value}))
    for name in ("keys", "values"):
        given = {key: rows(2)[key] for key in ("keys", "values")} | {name: value}
        refused(cache, lambda given=given: cache.update_and_fetch(0, **given))
    mx.eval(cache.attend(0, **rows(2)))
    refused(cache, lambda: cache.attend_again(0, value, SCALE))
    mx.eval(cache.attend(1, **rows(2)))


@pytest.mark.parametrize("cache_class", CACHES)
def test_a_position_beyond_the_end_says_the_nearest(cache_class: type[Any]) -> None:
    cache = made(cache_class)
    with pytest.raises(RewindError) as refusal:
        cache.rewind(0, 9)
    assert refusal.value.nearest == 3


@pytest.mark.parametrize("cache_class", CACHES)
def test_what_was_restored_holds_no_declaration(cache_class: type[Any]) -> None:
    """A snapshot after a step, and one beside a declaration: neither brings its step back."""
    cache = made(cache_class)
    held = cache.snapshot()
    cache.declare_step([(0, 2)])
    declared = cache.snapshot()
    for snapshot in (held, declared):
        cache.restore(snapshot)
        refused(cache, lambda: cache.attend(0, **rows(3)))
        refused(cache, lambda: cache.attend(0, **rows(2)))
        refused(cache, lambda: cache.attend_again(0, rows(3)["queries"], SCALE))
        refused(cache, cache.step_positions)
    step(cache, 2)
    assert cache.position(0) == 5
