"""What happens around a step must not change it: growth, other layers, other questions.

Each case is small and named; the state machine covers their combinations.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache.errors import PositionError
from mlx_kvcache.facts.config import CacheConfig
from tests.support.arrays import numbers, raw
from tests.support.sequence_oracle import (
    FORMS,
    Question,
    Session,
    Shape,
    make_cache,
    simple_geometry,
)

ASK = Question()


def session(*windows: int, **choices: object) -> Session:
    return Session([Shape(window) for window in windows], **choices)


def filled(run: Session, length: int) -> Session:
    for _ in range(length):
        run.step(1)
    run.flush()
    return run


def test_a_reservation_in_the_middle_of_a_decode_step() -> None:
    """The step that fills the pool exactly answers the whole pool, until the pool grows."""
    for window in (0, 9):
        run = filled(session(window, window, initial_capacity=4), 3)
        run.step(1, reserve=(1, 100))
        run.flush()
        filled(run, 4)


def test_rows_are_read_again_after_a_reservation() -> None:
    run = filled(session(0, initial_capacity=4), 4)
    for cache in run.caches:
        expected = cache.layers[0].keys_and_values()
        cache.reserve(100)
        again = cache.layers[0].keys_and_values()
        for before, after in zip(expected, again, strict=True):
            assert before.shape == after.shape
            assert (numbers(before) == numbers(after)).all()


@pytest.mark.slow
@pytest.mark.parametrize("decoy", [1, 2, 3, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_masks_for_other_counts_do_not_change_the_order_of_the_rows(count: int, decoy: int) -> None:
    for length in range(4, 16):
        run = filled(session(4, spare=4), length)
        run.step(count, [Question(decoys=(decoy,))])
        run.flush()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("narrow", [None, 2])
def test_a_mask_asked_for_after_another_layer_was_written(count: int, narrow: int | None) -> None:
    """The first layer of the policy was not asked for a mask, the second is."""
    for length in range(4, 16):
        run = filled(session(4, 4, spare=4), length)
        run.step(count, [None, Question(narrow)])
        run.flush()


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_mask_that_is_abandoned_does_not_outlive_a_rewind(count: int) -> None:
    for length in range(5, 16):
        run = filled(session(4, spare=4), length)
        run.ask(0, count, ASK)
        assert run.rewind(length)
        run.step(count)
        run.flush()


def test_a_step_keeps_the_dtypes_of_each_layer() -> None:
    """The second layer of a step gets the caller's dtype back, whatever the first had."""
    run = filled(session(0, 0), 3)
    run.dtypes = [(mx.float32, mx.float32), (mx.bfloat16, mx.float16)]
    run.step(2)
    run.flush()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_change_of_dtype_loses_no_row(window: int, count: int) -> None:
    run = filled(session(window), 6)
    for dtype in (mx.bfloat16, mx.float32, mx.float16):
        run.dtypes = [(dtype, dtype)]
        run.step(count)
        run.flush()


@pytest.mark.slow
@pytest.mark.parametrize("repair", ["rewind", "trim what is beyond", "trim in reverse"])
@pytest.mark.parametrize("windows", [(0, 0), (3, 3), (0, 3), (3, 0), (3, 0, 3)])
@pytest.mark.parametrize("ask", [None, ASK])
def test_a_torn_step_around_growth(
    windows: tuple[int, ...], repair: str, ask: Question | None
) -> None:
    """A layer that missed the step in which the pools grew is never written out of bounds."""
    layers = range(len(windows))
    for length, written in itertools.product(range(1, 10), layers):
        run = filled(session(*windows, spare=4, initial_capacity=2), length)
        run.step(1, None, [written])
        run.flush()
        order = {"rewind": None, "trim what is beyond": layers}.get(repair, layers[::-1])
        assert run.rewind(length, order)
        for order in (layers, layers[::-1]):
            for _ in range(2):
                run.step(1, [ask] * len(windows), order)
                run.flush()


@pytest.mark.parametrize("window", [0, 3])
def test_the_buffers_may_be_replaced_by_the_same_rows_with_a_dependency(window: int) -> None:
    """As pipelines do, to order a layer's work behind that of another."""
    run = filled(session(window, window), 5)
    for count in (1, 2, 1):
        for cache in run.caches:
            for layer in cache.layers:
                layer.keys = mx.depends(layer.keys, mx.array(1.0))
                layer.values = mx.depends(layer.values, mx.array(1.0))
        run.step(count, [ASK] * 2)
        run.flush()


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_was_left_behind_is_refused_or_served_in_bounds(form: str) -> None:
    """A caller who rewinds some layers only must not reach memory that is not the pool's."""
    cache = make_cache(simple_geometry(0, 0), CacheConfig(100, initial_capacity=4), form)
    _write(cache, 0, 10)
    _write(cache, 1, 10)
    cache.layers[0].trim(6)
    before = [raw(array) for array in cache.state]
    for layer, count in ((0, 30), (0, 1), (1, 1)):
        with pytest.raises(PositionError, match="rewind"):
            _write(cache, layer, count)
    assert [layer.offset for layer in cache.layers] == [4, 10]
    assert [raw(array) for array in cache.state] == before
    cache.layers[1].trim(6)
    for _ in range(30):
        _write(cache, 0, 1)
        _write(cache, 1, 1)
        assert cache.layers[1].rows >= cache.layers[1].offset


@pytest.mark.parametrize("policy", [0, 3])
def test_half_a_trim_is_refused_at_the_first_layer_until_it_is_whole(policy: int) -> None:
    for repair in ("trim the other", "rewind"):
        cache = make_cache(simple_geometry(policy, policy), CacheConfig(100, spare=4), "array")
        for _ in range(10):
            _write(cache, 0, 1)
            _write(cache, 1, 1)
        cache.layers[0].trim(1)
        assert [layer.offset for layer in cache.layers] == [9, 10]
        for layer in (0, 1):
            with pytest.raises(PositionError, match="rewind"):
                _write(cache, layer, 1)
        cache.layers[1].trim(1) if repair == "trim the other" else cache.rewind(9)
        for _ in range(3):
            _write(cache, 0, 1)
            _write(cache, 1, 1)
        assert [layer.offset for layer in cache.layers] == [12, 12]


@pytest.mark.parametrize("written", [0, 1])
def test_half_a_step_is_refused_at_the_layer_that_has_it_too(written: int) -> None:
    cache = make_cache(simple_geometry(0, 3), CacheConfig(100, spare=1), "array")
    for _ in range(6):
        _write(cache, 0, 1)
        _write(cache, 1, 1)
    _write(cache, written, 1)
    with pytest.raises(PositionError, match="rewind to 6 or less"):
        _write(cache, written, 1)
    cache.rewind(6)
    for layer in (0, 1):
        _write(cache, layer, 1)
    assert [layer.offset for layer in cache.layers] == [7, 7]


def _write(cache, layer: int, count: int) -> None:
    keys, values = mx.ones((1, 2, count, 3)), mx.ones((1, 2, count, 2))
    mx.eval(cache.layer(layer).update_and_fetch(keys, values))


def test_an_interrupt_anywhere_in_a_step_costs_no_earlier_step() -> None:
    """Wherever it falls, the way back leads to where the step began, and not further."""
    reached = 0
    for line in itertools.count():
        cache = make_cache(simple_geometry(0, 3), CacheConfig(100, spare=4), "array")
        for count in (8, 1):
            for layer in (0, 1):
                _write(cache, layer, count)
        if not interrupted_at(line, lambda cache=cache: _write(cache, 0, 1)):
            break
        reached += 1
        cache.rewind(9)
        assert [layer.offset for layer in cache.layers] == [9, 9]
        for layer in (0, 1):
            _write(cache, layer, 1)
        assert cache.length == 10
    assert reached > 20


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_step_that_was_interrupted_in_a_layer_is_finished_by_those_that_lack_it(
    form: str, count: int
) -> None:
    """Each layer is counted once, when it has written: no line leaves one too many to wait for."""
    reached = 0
    for line in itertools.count():
        cache = make_cache(simple_geometry(0, 3), CacheConfig(100, spare=4), form)
        for layer in (0, 1):
            _write(cache, layer, 8)
        if not interrupted_at(line, lambda cache=cache: _write(cache, 0, count)):
            break
        reached += 1
        for layer in (0, 1):
            if cache.layers[layer].offset == 8:
                _write(cache, layer, count)
        for layer in (0, 1):
            _write(cache, layer, 1)
        assert [layer.offset for layer in cache.layers] == [9 + count] * 2
    assert reached > 20


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_interrupted_layer_that_is_asked_again_answers_as_it_would_have(count: int) -> None:
    """Also after it wrote over the rows that a step larger than the spare rows reads."""
    reached = 0
    for line in itertools.count():
        run = filled(session(3, spare=2, forms=("array",)), 9)
        keys, values = map(mx.array, run.rows(0, count))
        layer = run.caches[0].layers[0]
        expected = [raw(part) for part in copy.deepcopy(layer).update_and_fetch(keys, values)]

        def ask(layer=layer, keys=keys, values=values) -> list[object]:
            return [raw(part) for part in layer.update_and_fetch(keys, values)]

        if not interrupted_at(line, ask):
            break
        reached += 1
        if layer.offset == 9:
            assert ask() == expected
    assert reached > 20


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Whether a KeyboardInterrupt before the line executed after so many others ended the call."""
    seen = itertools.count()

    def local(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line" and next(seen) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return local

    def begin(frame: FrameType, *_: object) -> Any:
        return local if "mlx_kvcache" in frame.f_code.co_filename else None

    sys.settrace(begin)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
