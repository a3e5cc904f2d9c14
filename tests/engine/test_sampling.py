"""Sampling: mlx-lm's own samplers, a random state for each request, whoever else is there."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.integrations.sampling import Sampling
from tests.support.engine_runs import KINDS, alone, prompts_of, run, tiny

COUNT = 16
SAMPLINGS = (
    Sampling(temp=0.8, seed=1),
    Sampling(temp=1.5, top_p=0.7, seed=2**63 + 11),
    Sampling(temp=0.8, seed=0),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_request_draws_what_it_would_draw_alone(kind):
    model = tiny("llama")
    prompts = prompts_of("llama", (5, 14, 5))
    pairs = list(zip(prompts, SAMPLINGS, strict=True))
    expected = [alone(model, prompt, COUNT, sampling) for prompt, sampling in pairs]
    engine = Engine(model, 300, kind, max_active=4)
    greedy = engine.submit(prompts[0], max_tokens=COUNT)
    requests = [
        engine.submit(prompt, max_tokens=COUNT, sampling=sampling) for prompt, sampling in pairs
    ]
    run(engine)
    assert [request.tokens for request in requests] == expected
    assert greedy.tokens == alone(model, prompts[0], COUNT)
    assert greedy.tokens != requests[0].tokens
    other = engine.submit(prompts[0], max_tokens=COUNT, sampling=Sampling(temp=0.8, seed=7))
    run(engine)
    assert other.tokens != expected[0]


def test_without_a_seed_answers_differ():
    engine = Engine(tiny("llama"), 300)
    requests = [engine.submit([3], max_tokens=20, sampling=Sampling(temp=1.0)) for _ in range(3)]
    run(engine)
    assert len({tuple(request.tokens) for request in requests}) == 3


def test_the_random_state_of_the_thread_is_left_as_it_was():
    engine = Engine(tiny("llama"), 300)
    mx.random.seed(5)
    engine.submit([3], max_tokens=6, sampling=Sampling(temp=1.0, seed=9))
    run(engine)
    left = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    assert mx.random.uniform(shape=(4,)).tolist() == left
    assert mx.random.uniform(shape=(4,)).tolist() != left


def test_a_sampler_of_the_callers_own_gets_log_probabilities():
    seen = []

    def second_best(logprobs: mx.array) -> mx.array:
        seen.append(float(mx.exp(logprobs).sum()))
        return mx.argsort(logprobs, axis=-1)[:, -2]

    engine = Engine(tiny("llama"), 300)
    request = engine.submit([3, 4], max_tokens=5, sampler=second_best)
    run(engine)
    assert seen == pytest.approx([1.0] * 5, abs=1e-4)
    assert request.tokens[0] != alone(tiny("llama"), [3, 4], 1)[0]
