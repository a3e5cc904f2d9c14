"""An interruption at any line of the engine costs a repetition: same tokens, same events."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mlx_kvcache.engine
from mlx_kvcache.engine import Engine, Event
from mlx_kvcache.engine.admission import Admission
from mlx_kvcache.errors import RewindError
from mlx_kvcache.integrations.attention import FlatModel
from mlx_kvcache.integrations.sampling import Sampling
from tests.support.engine_runs import KINDS, alone, prompts_of, tiny
from tests.support.interrupts import Fuse

PACKAGE = Path(mlx_kvcache.engine.__file__).parents[1]
FILES = {str(path) for path in (PACKAGE / "engine").glob("*.py")}
FILES.add(str(PACKAGE / "integrations" / "attention.py"))
COUNT = 6


class Interrupter:
    """Raises KeyboardInterrupt the `hit`-th time that a line of the engine is reached."""

    def __init__(self, hit: int) -> None:
        self.hit = hit
        self.reached: Counter[tuple[str, int]] = Counter()
        self.interrupts = 0

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` answers once it is not interrupted any more."""
        while True:
            sys.settrace(self._trace)
            try:
                return function()
            except KeyboardInterrupt:
                self.interrupts += 1
            finally:
                sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.reached[line] += 1
            if self.reached[line] == self.hit:
                raise KeyboardInterrupt
        return self._trace


def asked(engine: Engine) -> list[Any]:
    """Every kind of request at once: of its own, sampled, of a session, and of its forks."""
    first, second, third = prompts_of("llama", (9, 14, 5))
    parent = engine.open()
    return [
        parent.submit(first, max_tokens=0),
        engine.submit(second, max_tokens=COUNT),
        engine.submit(third, max_tokens=COUNT, sampling=Sampling(temp=1.0, seed=4)),
        engine.submit(third, max_tokens=COUNT, parent=parent),
        engine.submit(second, max_tokens=COUNT, parent=parent),
        engine.submit([95], max_tokens=COUNT, sampler=lambda _: 1 / 0),
        engine.submit([7], max_tokens=COUNT),
    ]


def told(requests: list[Any], events: list[Event]) -> dict[int, list[Any]]:
    """The events of each request by its place."""
    place = {id(request): index for index, request in enumerate(requests)}
    answer: dict[int, list[Any]] = {index: [] for index in place.values()}
    for event in events:
        answer[place[id(event.request)]].append(event[1:])
    return answer


def engine_of(kind: str) -> Engine:
    return Engine(tiny("llama"), 110, kind, step_tokens=8, max_active=4, spare=16)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_every_line(kind, hit):
    quiet = engine_of(kind)
    expected_requests = asked(quiet)
    expected = told(expected_requests, list(quiet.run()))
    engine = engine_of(kind)
    requests = asked(engine)
    interrupter = Interrupter(hit)
    events: list[Event] = []
    interrupter.call(lambda: drained(engine, events))
    assert interrupter.interrupts > 100
    assert told(requests, events) == expected
    assert [each.tokens for each in requests] == [each.tokens for each in expected_requests]
    assert [each.session and each.session.tokens for each in requests] == [
        each.session and each.session.tokens for each in expected_requests
    ]
    assert engine.cache.used == 9
    assert len(engine.cache.sequences) == 1
    assert not engine.cache.unfinished


def drained(engine: Engine, events: list[Event]) -> None:
    for event in engine.run():
        events.append(event)


def test_without_mending_tokens_are_lost_or_doubled(monkeypatch):
    """What the test above would show if an interrupted step were just followed by the next."""
    quiet = engine_of("cell")
    expected = told(requests := asked(quiet), list(quiet.run()))
    monkeypatch.setattr(Engine, "_mend", lambda _: None)
    engine = engine_of("cell")
    requests = asked(engine)
    events: list[Event] = []
    try:
        Interrupter(2).call(lambda: drained(engine, events))
    except Exception:
        return
    assert told(requests, events) != expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_start_feeds_the_prompt_once(monkeypatch, kind):
    prompts = prompts_of("llama", (9, 14))
    engine = Engine(tiny("llama"), 100, kind)
    session = engine.open()
    start = Admission.start

    def interrupted(self, request):
        start(self, request)
        monkeypatch.undo()
        raise KeyboardInterrupt

    answers = []
    for prompt in prompts:
        monkeypatch.setattr(Admission, "start", interrupted)
        request = session.submit(prompt, max_tokens=COUNT)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        answers.append(list(request.stream()))
    assert session.tokens == [*prompts[0], *answers[0], *prompts[1], *answers[1]]
    assert answers[1] == alone(tiny("llama"), [*prompts[0], *answers[0], *prompts[1]], COUNT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_interrupted_at_any_point_feeds_the_prompt_once(kind):
    """Its beginning is noted and its tokens are appended in one statement, or one would be lost."""
    prompt = prompts_of("llama", (3,))[0]
    expected = alone(tiny("llama"), prompt, 2)
    files = set()
    for at in range(400):
        engine = Engine(tiny("llama"), 40, kind)
        session = engine.open()
        request = session.submit(prompt, max_tokens=2)
        fuse = Fuse(at)
        with pytest.raises(KeyboardInterrupt):
            fuse.call(engine.step)
        assert list(request.stream()) == expected, fuse.place
        assert session.tokens == [*prompt, *expected], fuse.place
        files.add(fuse.place and fuse.place[0])
    assert {"engine/admission.py", "engine/engine.py", "engine/scheduler.py"} < files


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_nobody_was_given_holds_nothing(kind):
    """The interrupt falls when it is made and the engine is whole, or its user drops it."""
    prompt = prompts_of("llama", (3,))[0]
    engine = Engine(tiny("llama"), 40, kind)
    parent = engine.open()
    list(parent.submit(prompt, max_tokens=2).stream())
    held, whole = engine.cache.used, 0
    for verb in (engine.open, parent.fork):
        for at in range(5000):
            fuse = Fuse(at)
            with suppress(KeyboardInterrupt):
                fuse.call(verb)
            whole += engine._is_whole
            engine.compact()
            assert len(engine.cache.sequences) == 1, fuse.place
            assert engine.cache.used == held, fuse.place
            if fuse.place is None:
                break
        assert 20 < at < 4999
    assert whole > 4
    assert parent.tokens[:3] == prompt


@pytest.mark.parametrize("kind", KINDS)
def test_a_close_interrupted_at_any_point_is_finished_by_the_next(kind):
    prompt = prompts_of("llama", (3,))[0]
    engine = Engine(tiny("llama"), 8, kind)
    for at in range(400):
        session = engine.open()
        list(session.submit(prompt, max_tokens=2).stream())
        assert engine.free < 8
        fuse = Fuse(at)
        try:
            fuse.call(lambda session=session: engine.close(session))
        except KeyboardInterrupt:
            engine.close(session)
        assert engine.free == 8, fuse.place
        assert not engine.cache.sequences, fuse.place
        if fuse.place is None:
            break
    assert 50 < at < 399


@pytest.mark.parametrize("layers", [1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_beyond_the_spare_rows_is_interrupted(monkeypatch, kind, layers):
    """A step of 8 tokens on rings that can go back by one, after one layer and after all.

    The rings of a half-done step are kept; a session whose step is done is read again.
    """
    prompt = prompts_of("gemma3_text", (60,))[0]
    engine = Engine(tiny("gemma3_text"), 200, kind, step_tokens=8, max_active=2, spare=1)
    session = engine.open()
    request = session.submit(prompt, max_tokens=COUNT)
    for _ in range(5):
        engine.step()
    run, cache_type = FlatModel.forward, type(engine.cache)

    def interrupted(self, cache, tokens):
        attend = cache_type.attend

        def attend_first(cache, layer, *arguments, **choices):
            if layer == layers:
                raise KeyboardInterrupt
            return attend(cache, layer, *arguments, **choices)

        with monkeypatch.context() as patch:
            patch.setattr(cache_type, "attend", attend_first)
            run(self, cache, tokens)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FlatModel, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    is_lost = kind == "batched" and layers is None
    assert engine.cache.position(session.sequence) == (48 if is_lost else 40)
    assert not engine.cache.unfinished
    if kind == "batched":
        with pytest.raises(RewindError):
            engine.cache.rewind(session.sequence, 38)
    assert list(request.stream()) == alone(tiny("gemma3_text"), prompt, COUNT)
