"""SmolLM2 and Gemma 3 270M: batched equals single, token for token (greedy, float32)."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.models import load
from tests.support.engine_runs import KINDS, alone, run

pytestmark = pytest.mark.models

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a fisherman who",
    "2, 4, 6,",
    "The old lighthouse keeper wrote in his journal every evening. On Monday he noted the wind, "
    "on Tuesday a ship from Lisbon, and on Wednesday nothing at all. On Thursday he",
)
COUNT = 16


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]], list[list[int]]]:
    model, tokenizer = load(request.param, dtype="float32")
    prompts = [tokenizer.encode(text) for text in TEXTS]
    # Past the window of Gemma's rings.
    prompts.append((prompts[-1] * 20)[:530])
    return model, prompts, [alone(model, prompt, COUNT) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_prompts_past_the_window(real, kind):
    model, prompts, expected = real
    engine = Engine(model, 2048, kind, max_active=4, step_tokens=128, spare=16)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == expected
    other = engine.submit([*prompts[0][:-1], prompts[0][-1] + 1], max_tokens=COUNT)
    run(engine)
    assert other.tokens != expected[0]


@pytest.mark.parametrize("kind", KINDS)
def test_forks_of_a_common_beginning(real, kind):
    model, prompts, _ = real
    prefix = prompts[-2]
    engine = Engine(model, 1024, kind)
    parent = engine.open()
    parent.submit(prefix, max_tokens=0)
    requests = [engine.submit(prompt, max_tokens=COUNT, parent=parent) for prompt in prompts[:3]]
    run(engine)
    for request, prompt in zip(requests, prompts, strict=False):
        assert request.tokens == alone(model, [*prefix, *prompt], COUNT)
    assert (engine.metrics.peak_shared > 0) == (kind == "cell")
