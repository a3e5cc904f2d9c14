"""Batched equals single, token for token (greedy, float32)."""

from __future__ import annotations

from functools import cache

import pytest

from mlx_kvcache.engine import Engine
from tests.support.engine_runs import KINDS, alone, prompts_of, run, tiny

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "cohere2",
    "gemma3n",
    "gemma4_text",
    "mistral3",
    "olmoe",
)
LENGTHS = (3, 21, 1, 40, 9, 2)
COUNT = 24
COUNTS = (COUNT, 5, COUNT, 11, 1, 17)


@cache
def alone_of(family):
    """The tokens of each prompt alone: the same for every kind."""
    prompts = prompts_of(family, LENGTHS)
    return [alone(tiny(family), *pair) for pair in zip(prompts, COUNTS, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def test_unequal_sequences_that_join_and_leave(family, kind):
    """Rings of few spare rows wrap many times; three run at once, so that others join later."""
    model = tiny(family)
    prompts = prompts_of(family, LENGTHS)
    expected = alone_of(family)
    engine = Engine(model, 400, kind, max_active=3, step_tokens=16, initial_capacity=4, spare=2)
    requests = [
        engine.submit(prompt, max_tokens=count)
        for prompt, count in zip(prompts, COUNTS, strict=True)
    ]
    told = run(engine)
    assert [request.tokens for request in requests] == expected
    assert [told[request] for request in requests] == expected
    assert {request.finish_reason for request in requests} == {"length"}
    assert engine.metrics.peak_active == 3
    assert engine.cache.used == 0

    changed = [[(prompt[0] + 1) % 50, *prompt[1:]] for prompt in prompts[:2]]
    again = [
        engine.submit(prompt, max_tokens=count)
        for prompt, count in zip(changed, COUNTS, strict=False)
    ]
    run(engine)
    assert [request.tokens for request in again] != expected[:2], "the prompts make no difference"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_requests_submitted_in_mid_run(family, kind):
    model = tiny(family)
    prompts = prompts_of(family, (30, 4, 12))
    expected = [alone(model, prompt, COUNT) for prompt in prompts]
    engine = Engine(model, 300, kind, step_tokens=40, spare=4)
    first = engine.submit(prompts[0], max_tokens=COUNT)
    for _ in range(9):
        engine.step()
    assert 0 < len(first.tokens) < COUNT
    second = engine.submit(prompts[1], max_tokens=COUNT)
    for _ in range(5):
        engine.step()
    third = engine.submit(prompts[2], max_tokens=COUNT)
    assert list(third.stream()) == expected[2]
    run(engine)
    assert [first.tokens, second.tokens] == expected[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size_gives_the_same(kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (37, 5))
    expected = [alone(model, prompt, 8) for prompt in prompts]
    for step_tokens in (2, 3, 7, 64):
        engine = Engine(model, 128, kind, max_active=2, step_tokens=step_tokens, spare=1)
        requests = [engine.submit(prompt, max_tokens=8) for prompt in prompts]
        run(engine)
        assert [request.tokens for request in requests] == expected, step_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_stop_ids_end_an_answer_with_their_token(kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (6, 11))
    whole = [alone(model, prompt, COUNT) for prompt in prompts]
    stop = [whole[0][4]]
    engine = Engine(model, 128, kind)
    requests = [engine.submit(prompt, max_tokens=COUNT, stop=stop) for prompt in prompts]
    run(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(model, prompt, COUNT, stop=stop)
    assert requests[0].finish_reason == "stop"
    assert requests[0].tokens[-1] == stop[0]


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_windows_reach_the_engine(kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (20, 9))
    expected = [alone(model, prompt, COUNT, windows=[3]) for prompt in prompts]
    assert expected != [alone(model, prompt, COUNT) for prompt in prompts]
    engine = Engine(model, 128, kind, windows=[3], spare=1)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == expected
