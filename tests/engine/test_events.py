"""Events are handed out once each, whoever runs the steps."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import CapacityError
from tests.support.engine_runs import alone, prompts_of, run, tiny

COUNT = 6


def told(request: Any, events: list[Any]) -> list[int]:
    return [event.token for event in events if event.request is request]


def test_a_dropped_run_loses_no_event():
    prompts = prompts_of("llama", (9, 14, 5))
    engine = Engine(tiny("llama"), 200)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    events = []
    while not engine.is_idle or len(events) < 3 * COUNT:
        # One event of a step that made three.
        events.append(next(engine.run()))
    for request, prompt in zip(requests, prompts, strict=True):
        assert told(request, events) == request.tokens == alone(tiny("llama"), prompt, COUNT)
    assert list(engine.run()) == engine.step() == []


def test_a_stream_leaves_the_events_of_others():
    prompts = prompts_of("llama", (9, 14))
    engine = Engine(tiny("llama"), 200)
    streamed, other = (engine.submit(prompt, max_tokens=COUNT) for prompt in prompts)
    early = next(engine.run())
    assert early.request is streamed
    assert list(streamed.stream()) == alone(tiny("llama"), prompts[0], COUNT)
    events = list(engine.run())
    assert {event.request for event in events} == {other}
    assert told(other, events) == other.tokens == alone(tiny("llama"), prompts[1], COUNT)
    # A stream of what has ended tells it again, and runs nothing.
    assert list(streamed.stream()) == streamed.tokens
    assert engine.step() == []


def test_two_streams_and_a_run_in_turns():
    prompts = prompts_of("llama", (9, 14, 5))
    engine = Engine(tiny("llama"), 200)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    streams = [request.stream() for request in requests[:2]]
    got: list[list[int]] = [[], []]
    events = []
    for number in range(COUNT):
        for stream, tokens in zip(streams, got, strict=True):
            tokens.append(next(stream))
        if number % 2:
            events += [event for event in engine.step() if event.request is requests[2]]
    events += list(engine.run())
    expected = [alone(tiny("llama"), prompt, COUNT) for prompt in prompts]
    assert [*got, told(requests[2], events)] == expected


def test_a_stream_that_waits_for_idle_sessions_is_refused_though_events_are_kept():
    engine = Engine(tiny("llama"), 40)
    session = engine.open()
    first = session.submit([1] * 20, max_tokens=2)
    other = engine.submit([5], max_tokens=2)
    assert len(list(first.stream())) == 2
    request = engine.submit([2, 3], max_tokens=20)
    for _ in range(2):
        with pytest.raises(CapacityError, match="idle sessions"):
            list(request.stream())
    assert told(other, engine.step()) == other.tokens
    session.close()
    run(engine)
    assert request.tokens == alone(tiny("llama"), [2, 3], 20)
