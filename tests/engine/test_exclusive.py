"""A call from within another one of the same engine is refused, and changes no answer."""

from __future__ import annotations

import weakref

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import SessionError
from tests.support.engine_runs import KINDS, alone, prompts_of, tiny
from tests.support.interrupts import Fuse

COUNT = 4
FIRST, SECOND = prompts_of("llama", (5, 3))
VERBS = {
    "open": lambda engine, _: engine.open(),
    "fork": lambda engine, idle: engine.fork(idle),
    "submit": lambda engine, _: engine.submit([1], max_tokens=1),
    "compact": lambda engine, _: engine.compact(),
    "step": lambda engine, _: engine.step(),
    "run": lambda engine, _: list(engine.run()),
    "stream": lambda engine, _: list(engine.active[-1].stream()),
    "close": lambda engine, idle: engine.close(idle),
    "shutdown": lambda engine, _: engine.shutdown(),
}


def answers() -> list[list[int]]:
    return [alone(tiny("llama"), prompt, COUNT) for prompt in (FIRST, SECOND)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_sampler_may_not_call_its_engine(kind, verb):
    engine = Engine(tiny("llama"), 64, kind)
    idle = engine.open()
    refused = []

    def sampler(logprobs):
        with pytest.raises(SessionError, match="runs another call"):
            VERBS[verb](engine, idle)
        refused.append(verb)
        return mx.argmax(logprobs, axis=-1)

    requests = [
        engine.submit(FIRST, max_tokens=COUNT, sampler=sampler),
        engine.submit(SECOND, max_tokens=COUNT),
    ]
    list(engine.run())
    assert [request.tokens for request in requests] == answers()
    assert refused == [verb] * COUNT
    assert idle.sequence is not None
    assert engine.metrics.submitted == 2
    if verb not in ("run", "stream"):
        VERBS[verb](engine, idle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["cancel", "close a closed one", "position", "another engine"])
def test_what_a_sampler_may_do(kind, verb):
    engine, other = (Engine(tiny("llama"), 64, kind) for _ in range(2))
    idle, closed = engine.open(), engine.open()
    closed.close()
    cancelled = engine.submit(SECOND, max_tokens=COUNT)

    def sampler(logprobs):
        if verb == "cancel":
            cancelled.cancel()
        elif verb == "position":
            assert idle.position == 0
        elif verb == "another engine":
            assert list(other.submit(SECOND, max_tokens=COUNT).stream()) == answers()[1]
        else:
            closed.close()
        return mx.argmax(logprobs, axis=-1)

    request = engine.submit(FIRST, max_tokens=COUNT, sampler=sampler)
    list(engine.run())
    assert request.tokens == answers()[0]
    assert (cancelled.finish_reason == "cancelled") is (verb == "cancel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_signal_handler_that_closes_a_session_harms_no_step(kind, state):
    """At every point of it: the session is closed, or that is refused; one that is, stays so."""
    expected = answers()
    for at in range(0, 100_000, 331):
        engine = Engine(tiny("llama"), 64, kind)
        session = engine.open()
        if state == "closed":
            session.close()
        requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in (FIRST, SECOND)]
        refused = []

        def close(*_, engine=engine, session=session, refused=refused):
            try:
                engine.close(session)
            except SessionError as error:
                refused.append(error)

        fuse = Fuse(at, close)
        fuse.call(lambda engine=engine: list(engine.run()))
        assert [request.tokens for request in requests] == expected, fuse.place
        if fuse.place is None:
            break
        assert (session.sequence is None) is not bool(refused), fuse.place
        assert not (refused and state == "closed"), fuse.place
        session.close()
        assert not engine.cache.sequences, fuse.place
    assert at > 500


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_was_interrupted_runs_no_more(kind):
    """Even while its traceback is held."""
    engine = Engine(tiny("llama"), 64, kind)
    request = engine.submit(FIRST, max_tokens=COUNT)
    for at in range(0, 300, 7):
        try:
            Fuse(at).call(engine.step)
        except KeyboardInterrupt:
            engine.open().close()
    list(engine.run())
    assert request.tokens == answers()[0]


def test_a_finalizer_may_not_close_a_session_while_a_step_runs():
    engine = Engine(tiny("llama"), 64)
    session = engine.open()
    refused = []

    def close(_):
        try:
            session.close()
        except SessionError as error:
            refused.append(error)

    class Gone:
        pass

    held = [Gone()]
    reference = weakref.ref(held[0], close)

    def sampler(logprobs):
        held.clear()
        return mx.argmax(logprobs, axis=-1)

    request = engine.submit(FIRST, max_tokens=COUNT, sampler=sampler)
    list(engine.run())
    assert request.tokens == answers()[0]
    assert len(refused) == 1
    assert reference() is None
