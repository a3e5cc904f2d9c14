"""Sampling: mlx-lm's own samplers, a random state for each request, whoever else is there."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.integrations.sampling import Chooser, Sampling, check_sampling, sampler_of
from tests.support.engine_runs import KINDS, alone, prompts_of, run, snapshot, tiny, vocabulary
from tests.support.tiny_models import all_families, build

COUNT = 16


class Huge(int):
    """An integer that a test can be named by."""

    def __str__(self) -> str:
        return "huge"


HUGE = Huge(10**5000)
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
        ({"frequency_penalty": "1"}, "1e+30, got '1'"),
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


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("extreme", ["least", "most"])
@pytest.mark.parametrize(
    "field", ["temp", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_all_that_is_allowed_is_computed(field, extreme, dtype):
    """By the model's last token, or what the penalty drives away from, or towards."""
    positive = field in ("temp", "top_p", "repetition_penalty")
    bounds = (1e-30 if positive else -1e30, 1 if field == "top_p" else 1e30)
    sampling = Sampling(**{"temp": 1.0, field: bounds[extreme == "most"]})
    check_sampling(sampling)
    logits = mx.random.normal((1, 64), key=mx.random.key(3)).astype(dtype)
    likeliest = mx.argmax(logits, axis=-1).item()
    chosen = {Chooser(sampling).choose(logits, [likeliest, 5]).item() for _ in range(40)}
    if extreme == "most" and not field.endswith("penalty"):
        assert len(chosen) > 5
    elif field in ("temp", "top_p"):
        assert chosen == {likeliest}
    elif field == "repetition_penalty":
        # A factor divides a positive logit.
        assert (chosen == {likeliest}) is (extreme == "least")
    else:
        assert (chosen <= {likeliest, 5}) is (extreme == "least")
        assert extreme == "least" or not chosen & {likeliest, 5}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_low_temperature_is_greedy_in_half_precision(dtype):
    model = build("llama", all_families()["llama"])
    model.set_dtype(getattr(mx, dtype))
    engine = Engine(model, 100)
    prompt = prompts_of("llama", (5,))[0]
    requests = [
        engine.submit(prompt, max_tokens=6, sampling=sampling)
        for sampling in (Sampling(), Sampling(temp=1e-5), Sampling(temp=1e-30))
    ]
    run(engine)
    assert [request.tokens for request in requests] == [requests[0].tokens] * 3


def test_a_low_temperature_of_mlx_lm_is_greedy_in_half_precision():
    """What `generate` samples with, whose log-probabilities are the model's."""
    logits = mx.random.normal((1, 64), key=mx.random.key(3)).astype(mx.float16)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sampler = sampler_of(Sampling(temp=1e-30))
    assert {sampler(logprobs).item() for _ in range(20)} == {mx.argmax(logits).item()}


@pytest.mark.parametrize(
    "field", ["temp", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
)
@pytest.mark.parametrize("value", [10**400, HUGE, 1e31, -1e31, 1e-31, True, "1", None])
def test_a_number_out_of_bounds_is_refused(field, value):
    if field in ("min_p", "presence_penalty") and value == 1e-31:
        return
    with pytest.raises(ConfigError, match=rf"^{field} must be .*, got .{{1,80}}$"):
        check_sampling(Sampling(**{"temp": 1.0, field: value}))
    for name in ("seed", "top_k"):
        with pytest.raises(ConfigError, match="thousands of digits"):
            check_sampling(Sampling(**{name: HUGE}))
