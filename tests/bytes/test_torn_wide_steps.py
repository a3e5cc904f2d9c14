"""A step larger than a ring's spare rows, left half-way, is taken back to its start."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_kvcache.cache
from mlx_kvcache import CacheConfig, CacheGeometry, make_prompt_cache
from mlx_kvcache.cache import layer as layer_module
from mlx_kvcache.cache import sequence as sequence_module
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import PositionError
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer
from tests.support.arrays import raw
from tests.support.engine_runs import prompts_of, tiny
from tests.support.interrupts import Interrupter
from tests.support.sequence_oracle import Question, Session, Shape

PACKAGE = Path(mlx_kvcache.cache.__file__).parents[1]
FILES = frozenset(
    str(PACKAGE / name)
    for name in (
        "cache/layer.py",
        "cache/kept.py",
        "cache/sequence.py",
        "layout/sequence.py",
        "store/rows.py",
    )
)
WINDOWS = [(3, 3), (0, 3), (3, 0), (3, 0, 9), (9, 3, 3), (1, 3)]
SPARE, WIDE = 2, 7
GEOMETRY = CacheGeometry(tuple(Shape(window).geometry() for window in (3, 0, 9)))
CONFIG = CacheConfig(1000, None, 64, SPARE)


def wrapped(windows: Iterable[int], **choices: Any) -> Session:
    """All rings have wrapped, and were rewound a little."""
    run = Session([Shape(window) for window in windows], spare=SPARE, **choices)
    run.step(12)
    for _ in range(3):
        run.step(1, [Question()] * len(run.shapes))
    assert run.rewind(14)
    assert run.caches[0].rewind_floor == 13
    return run


def rings(cache: MLXSequenceCache) -> list[Any]:
    """Every byte of the rings, and where the sequence stands."""
    held = [
        (raw(layer.keys), raw(layer.values), layer.rows_held)
        for layer in cache.layers
        if layer.geometry.policy.window
    ]
    return [cache.length, cache.rewind_floor, cache.layout.high_water, held]


def subsets(count: int) -> Iterable[tuple[int, ...]]:
    """Some of the layers, not all, in every order."""
    for size in range(1, count):
        yield from itertools.permutations(range(count), size)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("back", ["at once", "one by one", "further"])
def test_the_start_of_the_step_is_reached(windows: tuple[int, ...], back: str) -> None:
    for written in subsets(len(windows)):
        run = wrapped(windows)
        before = [rings(cache) for cache in run.caches]
        run.step(WIDE, None, written)
        assert run.caches[0].length == 21
        if back == "further":
            assert run.rewind(13)
        else:
            assert run.rewind(14, None if back == "at once" else written)
            assert [rings(cache) for cache in run.caches] == before, written
        for cache in run.caches:
            assert cache.layout.kept is None
        assert not run.rewind(12)
        run.step(1, [Question()] * len(windows))
        run.step(WIDE)
        run.step(1)
        run.flush()


def test_it_may_be_taken_back_again_and_again_or_finished() -> None:
    run = wrapped((3, 0, 9))
    before = [rings(cache) for cache in run.caches]
    for written in ((0,), (2, 0), (1,), (2,)):
        run.step(WIDE, None, written)
        assert run.rewind(14)
        assert [rings(cache) for cache in run.caches] == before
    run.step(WIDE, None, (2, 0))
    run.step(WIDE, None, (1,))
    assert all(cache.layout.kept is None for cache in run.caches)
    assert not run.rewind(14), "what a whole step has overwritten is gone"
    run.step(1)
    run.flush()


def test_a_step_that_grows_the_rings_too() -> None:
    run = Session([Shape(20), Shape(0)], spare=SPARE, initial_capacity=4)
    run.step(3)
    run.step(30, None, [0])
    assert [layer.rows for layer in run.caches[0].layers] == [21, 4]
    assert run.rewind(3)
    run.step(2)
    run.step(40)
    run.flush()


def test_a_copy_in_the_middle_of_the_step_goes_back_by_itself() -> None:
    run = wrapped((3, 0, 3))
    before = rings(run.caches[0])
    run.step(WIDE, None, (0, 1))
    twin = copy.deepcopy(run.caches[0])
    assert run.rewind(14)
    run.step(1)
    assert twin.length == 21
    twin.rewind(14)
    assert rings(twin) == before
    run.flush()


def rows_of(random: int, layer: int, count: int) -> tuple[mx.array, mx.array]:
    key = mx.random.key(random * 100 + layer)
    both = mx.random.normal((1, 1, count, 4), key=key)
    return both[..., :2], both[..., 2:]


def step(cache: MLXSequenceCache, seed: int, count: int, layers: Iterable[int]) -> list[Any]:
    return [
        list(map(raw, cache.layer(layer).update_and_fetch(*rows_of(seed, layer, count))))
        for layer in layers
    ]


def begun() -> MLXSequenceCache:
    cache = MLXSequenceCache(GEOMETRY, CONFIG, MLXLMLayer)
    for seed, count in enumerate((12, 1, 1)):
        step(cache, seed, count, range(3))
    return cache


def after(cache: MLXSequenceCache) -> list[Any]:
    return [step(cache, seed, count, range(3)) for seed, count in ((7, 1), (8, WIDE), (9, 1))]


def each_line(call: Callable[[MLXSequenceCache], object], *prepare: Any) -> Iterable[Any]:
    """A cache for each line of a call, interrupted there the first and the last time."""

    def interrupted(at: int | None) -> tuple[Interrupter, MLXSequenceCache]:
        cache = begun()
        for verb in prepare:
            verb(cache)
        interrupter = Interrupter(FILES, at)
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.call(lambda: call(cache))
        return interrupter, cache

    lines = interrupted(None)[0].lines
    first = {place: at for at, place in reversed(list(enumerate(lines)))}
    last = {place: at for at, place in enumerate(lines)}
    assert len(first) > 20
    for at in sorted({*first.values(), *last.values()}):
        interrupter, cache = interrupted(at)
        assert len(interrupter.lines) == at + 1
        yield lines[at], cache


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_the_step() -> None:
    expected = after(begun())
    for line, cache in each_line(lambda cache: step(cache, 5, WIDE, range(3))):
        if all(layer.offset == 21 for layer in cache.layers):
            # It was written whole; only the end of the call is missing.
            continue
        cache.rewind(14)
        assert after(cache) == expected, line


@pytest.mark.slow
def test_an_interrupted_step_is_finished_by_the_layers_that_lack_it() -> None:
    whole = begun()
    step(whole, 5, WIDE, range(3))
    expected = after(whole)
    finished = 0
    for line, cache in each_line(lambda cache: step(cache, 5, WIDE, range(3))):
        step(cache, 5, WIDE, [index for index, each in enumerate(cache.layers) if each.offset < 21])
        try:
            answers = after(cache)
        except PositionError:
            # Interrupted between the offset of a layer and its count.
            continue
        finished += 1
        assert answers == expected, line
    assert finished > 50


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(0, 1), (2,)])
def test_an_interrupt_at_any_line_of_the_way_back(layers: tuple[int, ...]) -> None:
    expected = after(begun())

    def torn(cache: MLXSequenceCache) -> None:
        step(cache, 5, WIDE, layers)

    def trim(cache: MLXSequenceCache) -> None:
        for layer in layers:
            cache.layers[layer].trim(WIDE)

    for way in (lambda cache: cache.rewind(14), trim):
        for line, cache in each_line(way, torn):
            cache.rewind(14)
            assert after(cache) == expected, line


def test_what_is_not_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = after(begun())
    for module in (layer_module, sequence_module):
        monkeypatch.setattr(module, "put_back", lambda _: None)
    cache = begun()
    step(cache, 5, WIDE, (0,))
    cache.rewind(14)
    assert after(cache) != expected


def test_what_is_kept_goes_when_the_step_is_done() -> None:
    shape = Shape(1000, 4, 64, 64, shared=False)
    cache = Session([shape, shape], capacity=10_000, spare=8, forms=("array",)).caches[0]
    rows = [mx.ones((1, 4, count, 64)) for count in (1100, 300, 1)]

    def write(number: int, layers: tuple[int, ...] = (0, 1)) -> int:
        for layer in layers:
            cache.layer(layer).make_mask(rows[number].shape[2])
            mx.eval(cache.layer(layer).update_and_fetch(rows[number], rows[number]))
        mx.eval(cache.state)
        mx.synchronize()
        return mx.get_active_memory()

    mx.eval(rows)
    before = write(0)
    ring = cache.layers[0].nbytes
    assert ring > 2**20
    assert write(1, (0,)) - before > 0.9 * ring, "the former rows are held"
    cache.rewind(1100)
    assert write(2) - before < ring / 8
    mx.reset_peak_memory()
    assert write(2) - before < ring / 8
    assert mx.get_peak_memory() - before < ring / 8, "the ring is written in place"
    assert write(1) - before < ring / 8


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_prompt_cache_takes_back_a_prompt_that_was_broken_off(family: str) -> None:
    model = tiny(family)
    first, second = (mx.array([each]) for each in prompts_of(family, (40, 30)))
    cache, twin = make_prompt_cache(model, spare=2), make_prompt_cache(model, spare=2)
    for each in (cache, twin):
        mx.eval(model(first, cache=each))
    expected = model(second, cache=twin).tolist()
    assert 0 < cache.sequence.rewind_floor < 40, "the rings have wrapped"
    for layer in cache.sequence.layers[1:]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(layer), "_write", _until(layer, type(layer)._write))
            with pytest.raises(KeyboardInterrupt):
                model(second[:, ::-1], cache=cache)
        cache.rewind(40)
        assert cache.length == 40
    assert model(second, cache=cache).tolist() == expected


def _until(last: Any, write: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(layer: Any, *rows: mx.array) -> Any:
        if layer is last:
            raise KeyboardInterrupt
        return write(layer, *rows)

    return interrupted
