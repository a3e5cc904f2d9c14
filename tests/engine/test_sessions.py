"""Sessions: turns, forks, cancellation, waiting for room, and what is refused."""

from __future__ import annotations

import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import (
    CacheKindError,
    CapacityError,
    ConfigError,
    FaceError,
    KVCacheError,
    RewindError,
    SessionError,
    UnsupportedModelError,
)
from mlx_kvcache.integrations.sampling import Sampling
from tests.support.engine_runs import KINDS, alone, prompts_of, run, snapshot, tiny

COUNT = 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_turns_and_forks_continue_their_own_history(family, kind):
    model = tiny(family)
    first, second, third = prompts_of(family, (17, 5, 8))
    engine = Engine(model, 300, kind, spare=2)
    session = engine.open()
    one = session.submit(first, max_tokens=COUNT)
    run(engine)
    assert one.tokens == alone(model, first, COUNT)
    # The token that ended the answer was not fed.
    assert session.position == len(session.tokens) - 1
    history = [*first, *one.tokens]
    twin = session.fork()
    two, other = session.submit(second, max_tokens=COUNT), twin.submit(third, max_tokens=COUNT)
    run(engine)
    assert two.tokens == alone(model, [*history, *second], COUNT)
    assert other.tokens == alone(model, [*history, *third], COUNT)
    assert two.tokens != other.tokens
    session.close()
    again = twin.submit(second, max_tokens=COUNT)
    run(engine)
    assert again.tokens == alone(model, [*history, *third, *other.tokens, *second], COUNT)
    twin.close()
    assert engine.cache.used == 0


def test_a_fork_up_to_a_position_forgets_the_rest():
    model = tiny("llama")
    first, second = prompts_of("llama", (17, 5))
    for kind in KINDS:
        engine = Engine(model, 300, kind, spare=64)
        session = engine.open()
        session.submit(first, max_tokens=2)
        run(engine)
        twin = session.fork(up_to=11)
        assert twin.tokens == first[:11]
        request = twin.submit(second, max_tokens=COUNT)
        run(engine)
        assert request.tokens == alone(model, [*first[:11], *second], COUNT)
        with pytest.raises(RewindError):
            session.fork(up_to=100)


def test_a_parents_prefix_is_held_once_and_read_once():
    model = tiny("llama")
    prefix, *prompts = prompts_of("llama", (64, 3, 7, 1, 5))
    expected = [alone(model, [*prefix, *prompt], COUNT) for prompt in prompts]
    engine = Engine(model, 64 + 4 * (7 + COUNT), "cell", step_tokens=20, max_active=4)
    parent = engine.open()
    parent.submit(prefix, max_tokens=0)
    requests = [engine.submit(prompt, max_tokens=COUNT, parent=parent) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == expected
    metrics = engine.metrics
    assert metrics.peak_shared == 4 * 64
    assert metrics.peak_used <= 64 + sum(map(len, prompts)) + 4 * COUNT
    # All but the last token of each prompt, which a decode pass feeds.
    assert metrics.prompt_tokens == 64 + sum(map(len, prompts)) - 4
    assert engine.cache.used == 64
    parent.close()
    assert engine.cache.used == 0


def test_a_batched_parents_copies_count():
    model = tiny("llama")
    prefix, *prompts = prompts_of("llama", (30, 3, 7, 1))
    engine = Engine(model, 30 + 2 * (30 + 7 + COUNT), "batched", spare=2)
    parent = engine.open()
    parent.submit(prefix, max_tokens=0)
    requests = [engine.submit(prompt, max_tokens=COUNT, parent=parent) for prompt in prompts]
    run(engine)
    assert engine.metrics.peak_active == 2
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(model, [*prefix, *prompt], COUNT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_waits_for_room_and_then_is_right(kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (10, 12, 9))
    engine = Engine(model, 50, kind)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    engine.step()
    assert engine.active == tuple(requests[:2])
    assert engine.waiting == (requests[2],)
    run(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(model, prompt, COUNT)
    assert requests[2].queue_seconds > requests[0].queue_seconds


@pytest.mark.parametrize("kind", KINDS)
def test_cancelling_frees_the_room_and_harms_no_other(kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (60, 5, 8))
    engine = Engine(model, 200, kind, step_tokens=8, max_active=8)
    reading, decoding, waiting = (engine.submit(prompt, max_tokens=COUNT) for prompt in prompts)
    other = engine.submit(prompts[1], max_tokens=COUNT)
    for _ in range(5):
        engine.step()
    assert not reading.tokens
    assert decoding.tokens
    for request in (reading, decoding, waiting):
        request.cancel()
        request.cancel()
    ended = {event.request for event in engine.step() if event.finish_reason == "cancelled"}
    assert ended == {reading, decoding, waiting}
    assert decoding.tokens == alone(model, prompts[1], COUNT)[: len(decoding.tokens)]
    run(engine)
    assert other.tokens == alone(model, prompts[1], COUNT)
    assert engine.cache.used == 0
    assert engine.metrics.cancelled == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_goes_on_after_a_cancelled_request(kind):
    model = tiny("llama")
    first, second = prompts_of("llama", (30, 6))
    engine = Engine(model, 200, kind, step_tokens=8, max_active=4, spare=1)
    for steps in (2, 6):
        session = engine.open()
        request = session.submit(first, max_tokens=COUNT)
        for _ in range(steps):
            engine.step()
        request.cancel()
        after = None
        run(engine)
        after = session.submit(second, max_tokens=COUNT)
        run(engine)
        assert after.tokens == alone(model, [*first, *request.tokens, *second], COUNT)
        session.close()


def test_closing_a_session_cancels_its_request():
    engine = Engine(tiny("llama"), 100)
    session = engine.open()
    request = session.submit([1, 2, 3], max_tokens=9)
    engine.step()
    session.close()
    session.close()
    assert request.finish_reason == "cancelled"
    assert engine.is_idle
    assert engine.cache.used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_is_refused_and_changes_nothing(kind):
    engine = Engine(tiny("llama"), 60, kind, max_context=50)
    size = engine.vocabulary
    other = Engine(tiny("llama"), 60, kind).open()
    closed = engine.open()
    closed.close()
    busy = engine.open()
    busy.submit([1, 2], max_tokens=20)
    idle = engine.open()
    engine.step()
    before = snapshot(engine)
    good = {"prompt": [1, 2, 3], "max_tokens": 4}
    refused = [
        ({"prompt": []}, ConfigError),
        ({"prompt": [1, size]}, ConfigError),
        ({"prompt": [-1]}, ConfigError),
        ({"prompt": [True]}, ConfigError),
        ({"prompt": ["a"]}, ConfigError),
        ({"prompt": [1.0]}, ConfigError),
        ({"max_tokens": -1}, ConfigError),
        ({"max_tokens": 2.0}, ConfigError),
        ({"max_tokens": True}, ConfigError),
        ({"sampling": Sampling(temp=-1)}, ConfigError),
        ({"sampling": Sampling(temp=float("nan"))}, ConfigError),
        ({"sampling": Sampling(top_p=0)}, ConfigError),
        ({"sampling": Sampling(seed=-1)}, ConfigError),
        ({"sampling": Sampling(seed=2**64)}, ConfigError),
        ({"stop": ["x"]}, ConfigError),
        ({"session": idle, "parent": busy}, ConfigError),
        ({"max_tokens": 48}, CapacityError),
        ({"prompt": [1] * 47}, CapacityError),
        ({"session": closed}, SessionError),
        ({"parent": closed}, SessionError),
        ({"session": other}, SessionError),
        ({"session": busy}, SessionError),
    ]
    for change, error in refused:
        with pytest.raises(error) as caught:
            engine.submit(**{**good, **change})
        assert isinstance(caught.value, KVCacheError)
        assert snapshot(engine) == before, change
    assert engine.metrics.refused == len(refused)
    for session, error in ((closed, SessionError), (other, SessionError)):
        with pytest.raises(error):
            engine.fork(session)
    with pytest.raises(SessionError):
        engine.cancel(other.submit([1], max_tokens=1))
    with pytest.raises(RewindError):
        engine.fork(idle, up_to=1)
    assert snapshot(engine) == before
    accepted = engine.submit(**good)
    run(engine)
    assert accepted.tokens == alone(tiny("llama"), good["prompt"], 4)


def test_a_batched_fork_leaves_alone_what_is_reserved():
    engine = Engine(tiny("llama"), 60, "batched")
    session = engine.open()
    session.submit([1] * 20, max_tokens=0)
    run(engine)
    engine.submit([2, 3], max_tokens=30)
    engine.step()
    before = snapshot(engine)
    with pytest.raises(CapacityError, match="reserved"):
        session.fork()
    assert snapshot(engine) == before
    assert session.fork(up_to=8).position == 8
    run(engine)


def test_waiting_for_idle_sessions_forever_is_refused():
    engine = Engine(tiny("llama"), 40)
    session = engine.open()
    session.submit([1] * 30, max_tokens=0)
    run(engine)
    request = engine.submit([2, 3], max_tokens=20)
    with pytest.raises(CapacityError, match="idle sessions"):
        engine.step()
    assert engine.waiting == (request,)
    session.close()
    run(engine)
    assert request.tokens == alone(tiny("llama"), [2, 3], 20)


def test_a_closed_parent_fails_its_children_alone():
    engine = Engine(tiny("llama"), 100, max_active=1)
    parent = engine.open()
    parent.submit([4, 5, 6], max_tokens=0)
    run(engine)
    first = engine.submit([1, 2], max_tokens=6)
    child = engine.submit([7], max_tokens=3, parent=parent)
    last = engine.submit([1, 2], max_tokens=6)
    engine.step()
    parent.close()
    run(engine)
    assert isinstance(child.error, SessionError)
    assert first.tokens == last.tokens == alone(tiny("llama"), [1, 2], 6)


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"kind": "paged"}, CacheKindError),
        ({"kind": "sequence"}, FaceError),
        ({"capacity": 0}, ConfigError),
        ({"max_active": 0}, ConfigError),
        ({"step_tokens": 3, "max_active": 4}, ConfigError),
        ({"kv_dtype": "int4"}, ConfigError),
    ],
)
def test_impossible_engines_are_refused(choices, error):
    with pytest.raises(error):
        Engine(tiny("llama"), **{"capacity": 10, **choices})


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "recurrent"),
        ("deepseek_v3", "something of its own"),
        ("gemma2", "something of its own"),
        ("stablelm", "other keys and values"),
        ("afm7", "logits differ"),
        ("internlm2", "cannot be run"),
    ],
)
def test_models_that_cannot_are_refused(family, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        Engine(tiny(family), 64)
