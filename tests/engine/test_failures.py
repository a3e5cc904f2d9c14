"""A request that fails harms no other, whatever it is that fails."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.engine.passes import Passes
from mlx_kvcache.errors import ConfigError, NonFiniteError
from mlx_kvcache.integrations.attention import FlatModel
from tests.support.engine_runs import KINDS, alone, prompts_of, run, tiny
from tests.support.tiny_models import all_families, build

COUNT = 10
POISON = 7


def poisoned(family: str, value: float):
    """A model for which one token's embedding is no number."""
    model = build(family, all_families()[family])
    weight = model.model.embed_tokens.weight
    weight[POISON] = value
    model.model.embed_tokens.weight = weight
    mx.eval(model.parameters())
    return model


def clean(prompts):
    return [[token if token != POISON else POISON + 1 for token in prompt] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 4, -1], ids=["first", "prefill", "decode"])
def test_values_that_are_no_numbers_stay_with_their_request(kind, value, place):
    model = poisoned("llama", value)
    prompts = clean(prompts_of("llama", (9, 12, 7, 15)))
    expected = [alone(model, prompt, COUNT) for prompt in prompts]
    # A reference that meets the token would be no reference.
    assert all(POISON not in tokens for tokens in expected)
    bad = [*prompts[0]]
    bad[place] = POISON
    engine = Engine(model, 300, kind, step_tokens=8, max_active=6, initial_capacity=4)
    sessions = [engine.open() for _ in prompts]
    requests = [
        session.submit(prompt, max_tokens=COUNT)
        for session, prompt in zip(sessions[:2], prompts[:2], strict=True)
    ]
    for _ in range(3):
        engine.step()
    failing = engine.submit(bad, max_tokens=COUNT)
    requests += [
        session.submit(prompt, max_tokens=COUNT)
        for session, prompt in zip(sessions[2:], prompts[2:], strict=True)
    ]
    run(engine)
    assert isinstance(failing.error, NonFiniteError)
    assert failing.finish_reason == "failed"
    assert [request.tokens for request in requests] == expected
    # The cells of the failed request are taken again, and nothing of it is left in them.
    again = [session.submit([3, 1], max_tokens=COUNT) for session in sessions]
    fresh = engine.submit(prompts[1], max_tokens=COUNT)
    run(engine)
    assert fresh.tokens == expected[1]
    for request, prompt, tokens in zip(again, prompts, expected, strict=True):
        assert request.tokens == alone(model, [*prompt, *tokens, 3, 1], COUNT)
    assert engine.metrics.failed == 1


@pytest.mark.parametrize("kind", KINDS)
def test_several_failures_in_one_step(kind):
    model = poisoned("llama", float("nan"))
    good, *others = clean(prompts_of("llama", (9, 12, 7)))
    engine = Engine(model, 300, kind)
    failing = [engine.submit([*prompt, POISON], max_tokens=COUNT) for prompt in others]
    failing.append(engine.submit([POISON], max_tokens=COUNT))
    request = engine.submit(good, max_tokens=COUNT)
    run(engine)
    assert request.tokens == alone(model, good, COUNT)
    assert all(isinstance(each.error, NonFiniteError) for each in failing)
    assert engine.cache.used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_request_closes_its_session_and_shows_its_error(kind):
    model = poisoned("llama", float("nan"))
    engine = Engine(model, 300, kind)
    session = engine.open()
    twin_prompt = clean(prompts_of("llama", (8,)))[0]
    session.submit(twin_prompt, max_tokens=0)
    run(engine)
    twin = session.fork()
    request = session.submit([POISON], max_tokens=COUNT)
    with pytest.raises(NonFiniteError):
        list(request.stream())
    assert session.sequence is None
    # The fork shares the cells that the failed session owned.
    other = twin.submit([1], max_tokens=COUNT)
    run(engine)
    assert other.tokens == alone(model, [*twin_prompt, 1], COUNT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_that_raises_or_lies_fails_its_request(kind):
    model = tiny("llama")
    engine = Engine(model, 300, kind)

    def broken(_: mx.array) -> mx.array:
        raise ValueError("no such token")

    prompt = prompts_of("llama", (8,))[0]
    raising = engine.submit(prompt, max_tokens=COUNT, sampler=broken)
    lying = engine.submit(prompt, max_tokens=COUNT, sampler=lambda _: mx.array([10**6]))
    request = engine.submit(prompt, max_tokens=COUNT)
    run(engine)
    assert str(raising.error) == "no such token"
    assert isinstance(lying.error, ConfigError)
    assert request.tokens == alone(model, prompt, COUNT)
    assert engine.cache.used == 0


def stop_forward(monkeypatch, when, error):
    """Raise in a model's second layer, after the first has written, in the passes of `when`."""
    original = FlatModel.forward
    passes = iter(range(10**6))

    def forward(self, cache, tokens):
        number = next(passes)
        if not when(number, tokens.tolist()):
            return original(self, cache, tokens)
        attend = type(cache).attend
        with monkeypatch.context() as patch:

            def interrupted(cache, layer, *arguments, **choices):
                if layer == 1:
                    raise error
                return attend(cache, layer, *arguments, **choices)

            patch.setattr(type(cache), "attend", interrupted)
            return original(self, cache, tokens)

    monkeypatch.setattr(FlatModel, "forward", forward)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_raises_fails_only_who_it_raises_for(monkeypatch, kind):
    model = tiny("llama")
    good, bad = prompts_of("llama", (9, 9))
    marked = [*bad[:-1], 90]
    good = [token if token != 90 else 1 for token in good]
    engine = Engine(model, 300, kind, spare=4)
    stop_forward(monkeypatch, lambda _, tokens: 90 in tokens, ValueError("out of memory"))
    request = engine.submit(good, max_tokens=COUNT)
    failing = engine.submit(marked, max_tokens=COUNT)
    run(engine)
    assert str(failing.error) == "out of memory"
    monkeypatch.undo()
    assert request.tokens == alone(model, good, COUNT)
    assert engine.cache.used == 0
    assert not engine.cache.unfinished


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_step_is_taken_back_and_can_be_run_again(monkeypatch, kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (9, 14))
    engine = Engine(model, 300, kind, spare=8, step_tokens=8, max_active=4)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    stop_forward(monkeypatch, lambda number, _: number % 3 == 1, KeyboardInterrupt())
    interrupts = 0
    while not engine.is_idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert not engine.cache.unfinished
    assert interrupts > 3
    monkeypatch.undo()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(model, prompt, COUNT)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_after_a_pass_costs_nothing_but_the_pass(monkeypatch, kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (9, 14))
    engine = Engine(model, 300, kind, spare=2, step_tokens=8, max_active=4)
    parent = engine.open()
    parent.submit(prompts[1], max_tokens=0)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    child = engine.submit(prompts[0], max_tokens=COUNT, parent=parent)
    run_rows, passes = Passes.run, iter(range(10**6))

    def interrupted(self, rows, with_logits):
        results = run_rows(self, rows, with_logits)
        if next(passes) % 3 == 1:
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(Passes, "run", interrupted)
    interrupts = 0
    while not engine.is_idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 5
    monkeypatch.undo()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(model, prompt, COUNT)
    assert child.tokens == alone(model, [*prompts[1], *prompts[0]], COUNT)


def test_without_isolation_the_others_would_fail(monkeypatch):
    """What the tests above would show if a failed row were just dropped from its pass."""
    monkeypatch.setattr(Passes, "run", Passes._attempt)
    model = poisoned("llama", float("nan"))
    prompts = clean(prompts_of("llama", (9, 12)))
    failed = {}
    for kind in KINDS:
        engine = Engine(model, 300, kind)
        engine.submit([*prompts[0][:4], POISON, *prompts[0][4:]], max_tokens=COUNT)
        request = engine.submit(prompts[1], max_tokens=COUNT)
        run(engine)
        failed[kind] = request.error is not None
    assert failed == {"cell": True, "batched": False}
