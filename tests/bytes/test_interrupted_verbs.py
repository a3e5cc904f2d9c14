"""A verb that was interrupted anywhere: what follows is refused or right; it may be repeated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_kvcache.errors import PositionError
from mlx_kvcache.integrations.mlx_lm import PromptCache
from tests.support.arrays import raw
from tests.support.interrupts import Fuse
from tests.support.sequence_oracle import Question, Shape, observe
from tests.support.sequence_verbs import LongSession, Moment

pytestmark = pytest.mark.slow

FORMS = ("array", "integer")
#: Of the points of a restore so many apart are interrupted, others for each pair of moments.
STRIDE = 9
#: Steps of one token at once: they pass the rows that the smaller caches here have.
FURTHER = 9


def filled(form: str, length: int, reserved: int = 0) -> LongSession:
    """A session of a flat layer, a ring, and another flat one."""
    shapes = [Shape(0), Shape(3), Shape(0)]
    session = LongSession(shapes, capacity=200, spare=4, initial_capacity=2, forms=(form,))
    if length:
        session.step(length)
    if reserved:
        session.reserve(reserved)
    session.flush()
    return session


def interrupted(call: Callable[[], Any], at: int) -> bool:
    fuse = Fuse(at)
    try:
        fuse.call(call)
    except KeyboardInterrupt:
        return True
    return False


def goes_on(session: LongSession) -> None:
    for _ in range(FURTHER):
        session.step(1, [Question()] * 3)
    session.flush()


def moments(form: str) -> list[Moment]:
    """Empty and not, with few rows and with many."""
    sessions = [filled(form, 0), filled(form, 5), filled(form, 12, reserved=50)]
    sessions[0].step(1)
    sessions[0].clear()
    cleared = filled(form, 0, reserved=40)
    cleared.step(1)
    cleared.clear()
    sessions += [cleared, filled(form, 0)]
    return [session.take_snapshot() for session in sessions]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("repair", ["none", "clear", "restore"])
def test_an_interrupt_anywhere_in_a_restore(form: str, repair: str) -> None:
    """From each moment to each other one: with more rows and with fewer, longer and shorter."""
    reached = 0
    held = moments(form)
    for number, (now, moment) in enumerate(itertools.product(held, held)):
        stride = STRIDE if repair == "none" else 3 * STRIDE
        if repair == "none" and now is held[2] and moment is held[-1]:
            # A layer with rows becomes one without: at every point.
            stride = 1
        for at in itertools.count(number % stride, stride):
            session = filled(form, 0)
            restore(session, now)
            session.hold_moment(now)
            if not interrupted(lambda s=session, m=moment: restore(s, m), at):
                break
            reached += 1
            if repair == "none":
                is_refused_or_right(session, moment)
                continue
            if repair == "clear":
                session.cache.clear()
                session._forget(0)
            else:
                restore(session, moment)
                session.hold_moment(moment)
            goes_on(session)
    assert reached > 100


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 3])
def test_an_interrupt_anywhere_in_a_rewind(form: str, window: int) -> None:
    """Back over the step that runs, whose row is where the next one goes."""
    shapes = [Shape(window)]
    refused = 0
    for at in itertools.count():
        session = LongSession(shapes, capacity=200, spare=4, initial_capacity=8, forms=(form,))
        for _ in range(6):
            session.step(1)
        session.flush()
        if not interrupted(lambda s=session: s.cache.rewind(5), at):
            break
        keys, values = map(mx.array, session.rows(0, 1))
        layer = session.cache.layers[0]
        try:
            layer.update_and_fetch(keys, values)
        except PositionError:
            refused += 1
        else:
            assert session.cache.length == layer.offset
            assert session.cache.layout.unwritten == 0
    assert refused > 5


def restore(session: LongSession, moment: Moment) -> None:
    session.cache.restore(moment.snapshots[0])


def is_refused_or_right(session: LongSession, moment: Moment) -> None:
    """Steps that nothing was put right for: those of the cache before, or after, or none."""
    before = session.moment([])
    if not session.is_at_rest():
        for layer in session.layers:
            session.refuses(layer, 1)
        return
    for expected in (before, moment):
        twin = session.moment([])
        session.hold_rows(expected)
        try:
            goes_on(session)
        except PositionError:
            return
        except AssertionError:
            session.hold_rows(twin)
        else:
            return
    raise AssertionError("a step was taken by a cache that holds neither")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 3])
def test_an_interrupt_anywhere_in_the_first_step_of_another_dtype(form: str, window: int) -> None:
    """Asked again, or after a way back, the rows come in the dtype of whoever asks."""
    for at in itertools.count():
        session = LongSession([Shape(window)], capacity=200, spare=4, forms=(form,))
        session.step(6)
        session.flush()
        keys, values = (mx.array(part).astype(mx.bfloat16) for part in session.rows(0, 1))
        layer = session.cache.layers[0]
        if not interrupted(lambda n=layer, k=keys, v=values: n.update_and_fetch(k, v), at):
            break
        if at % 2 and layer.offset == 7:
            session.cache.rewind(6)
        for _ in range(2):
            answer = layer.update_and_fetch(keys, values)
            assert [part.dtype for part in answer] == [mx.bfloat16] * 2, at
    assert at > 40


@pytest.mark.parametrize("form", FORMS)
def test_an_interrupt_anywhere_in_a_reservation(form: str) -> None:
    for at in itertools.count():
        session = filled(form, 5)
        if not interrupted(lambda s=session: s.cache.reserve(10), at):
            break
        goes_on(session)
    assert at > 20


def test_an_interrupt_anywhere_in_the_restore_of_a_prompt_cache() -> None:
    """Layers and recurrent states are put back together, or no step is taken."""
    refused = 0
    for at in itertools.count():
        session = filled("array", 7)
        state = ArraysCache(1)
        prompt = PromptCache([*session.cache.layers, state], session.cache)
        state[0] = mx.array([1.0])
        snapshot = prompt.snapshot()
        held = observe(session.cache), raw(state[0])
        goes_on(session)
        state[0] = mx.array([2.0])
        if not interrupted(lambda p=prompt, s=snapshot: p.restore(s), at):
            break
        try:
            session.cache.layer(0).make_mask(1)
            session.cache.layout.admit(session.cache.layers[0].offset, 1)
        except PositionError:
            refused += 1
        else:
            is_old = session.cache.length == 7 + FURTHER and raw(state[0]) == raw(mx.array([2.0]))
            assert is_old or (observe(session.cache), raw(state[0])) == held
        prompt.restore(snapshot)
        assert (observe(session.cache), raw(state[0])) == held
    assert refused > 10
