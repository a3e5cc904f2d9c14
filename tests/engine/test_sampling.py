"""Sampling: mlx-lm's own samplers, a random state for each request, whoever else is there."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.integrations.sampling import Sampling, check_sampling
from tests.support.engine_runs import KINDS, alone, prompts_of, run, snapshot, tiny, vocabulary

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


#: Each of them changes what its prompt answers; no two are alike.
CHOICES = (
    Sampling(temp=1.2, top_k=3, seed=1),
    Sampling(temp=1.2, min_p=0.6, min_tokens_to_keep=2, seed=2),
    Sampling(temp=1.2, xtc_probability=0.7, xtc_threshold=0.01, xtc_special_tokens=(5,), seed=3),
    Sampling(repetition_penalty=1.8),
    Sampling(presence_penalty=1.5, presence_context_size=4),
    Sampling(frequency_penalty=0.9, frequency_context_size=0),
    Sampling(
        temp=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=4, repetition_penalty=1.3,
        repetition_context_size=7, presence_penalty=-0.4, frequency_penalty=0.2,
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_is_the_requests_own(kind):
    model = tiny("llama")
    # No prompt is longer than the windows that the choices look at.
    prompts = prompts_of("llama", (5, 9, 6, 12, 5, 7, 8))
    plain = [
        alone(model, prompt, COUNT, Sampling(temp=each.temp, seed=each.seed))
        for prompt, each in zip(prompts, CHOICES, strict=True)
    ]
    expected = [
        alone(model, prompt, COUNT, each) for prompt, each in zip(prompts, CHOICES, strict=True)
    ]
    assert all(one != other for one, other in zip(plain, expected, strict=True))
    engine = Engine(model, 400, kind, max_active=4)
    requests = [
        engine.submit(prompt, max_tokens=COUNT, sampling=each)
        for prompt, each in zip(prompts, CHOICES, strict=True)
    ]
    run(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    assert [request.tokens for request in requests] == expected


def test_a_penalty_sees_what_a_session_and_its_parent_have_said():
    model = tiny("llama")
    heavy = Sampling(presence_penalty=5.0, presence_context_size=0)
    first, second = prompts_of("llama", (6, 4))
    whole = alone(model, first + second, COUNT, heavy)
    engine = Engine(model, 400)
    parent = engine.open()
    parent.submit(first, max_tokens=0)
    request = engine.submit(second, max_tokens=COUNT, sampling=heavy, parent=parent)
    run(engine)
    assert request.tokens == whole
    # Whoever looks at the new tokens only would choose another one somewhere.
    narrow = Sampling(presence_penalty=5.0, presence_context_size=4)
    assert alone(model, first + second, COUNT, narrow) != whole


def test_limits_above_the_vocabulary_let_all_of_it_through():
    model, prompt = tiny("llama"), [3, 4]
    size = vocabulary("llama")
    wide = Sampling(temp=1.0, seed=3, top_k=size)
    engine = Engine(model, 100)
    request = engine.submit(prompt, max_tokens=COUNT, sampling=wide)
    run(engine)
    assert request.tokens == alone(model, prompt, COUNT, Sampling(temp=1.0, seed=3))
    assert request.tokens != alone(model, prompt, COUNT, Sampling(temp=1.0, seed=3, top_k=2))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"top_k": -1}, "top_k must be an integer from 0"),
        ({"top_k": 2.0}, "got 2.0"),
        ({"top_k": True}, "got True"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep must be an integer from 1"),
        ({"xtc_probability": -0.1}, "xtc_probability must be between 0 and 1"),
        ({"xtc_threshold": 0.6}, "xtc_threshold must be between 0 and 0.5"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be a positive number"),
        ({"repetition_penalty": float("nan")}, "got nan"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be a number"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number, got '1'"),
        ({"frequency_context_size": -1}, "frequency_context_size must be an integer from 0"),
        ({"seed": True}, "seed must be an integer from 0"),
    ],
)
def test_what_cannot_be_is_refused(choices, said):
    engine = Engine(tiny("llama"), 100)
    before = snapshot(engine)
    with pytest.raises(ConfigError, match=re.escape(said)):
        engine.submit([3], sampling=Sampling(**choices))
    assert snapshot(engine) == before


@pytest.mark.parametrize("field", ["temp", "top_p"])
def test_what_32_bits_cannot_compute_is_refused(field):
    check_sampling(Sampling(**{"temp": 1.0, field: 1e-6}))
    with pytest.raises(ConfigError, match=rf"^{field} must be at least"):
        check_sampling(Sampling(**{"temp": 1.0, field: 1e-7}))
