"""A thousand requests with random cancellations and refusals: nothing leaks, nothing is wrong."""

from __future__ import annotations

import random
from collections import Counter

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import KVCacheError
from mlx_kvcache.integrations.sampling import Sampling
from tests.support.engine_runs import KINDS, alone, prompts_of
from tests.support.tiny_models import all_families, build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("collected")]

REQUESTS = 1000
DISTINCT = 24


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_requests(kind):
    # A ring and a flat layer: what leaks, leaks from two layers as it does from more.
    config = {**all_families()["llama"], "num_hidden_layers": 2}
    model = build("llama", {**config, "layer_types": ["sliding_attention", "full_attention"]})
    generator = random.Random(1)
    lengths = [generator.randrange(1, 24) for _ in range(DISTINCT)]
    prompts = prompts_of("llama", lengths, seed=3)
    whole = [alone(model, prompt, 12) for prompt in prompts]
    engine = Engine(model, 160, kind, max_active=8, step_tokens=24, initial_capacity=0, spare=2)
    mx.clear_cache()
    baseline = mx.get_active_memory()
    accepted = []
    refused = 0
    while len(accepted) + refused < REQUESTS or not engine.is_idle:
        for _ in range(generator.randrange(4)):
            if len(accepted) + refused == REQUESTS:
                break
            number = generator.randrange(DISTINCT)
            count = generator.randrange(1, 13)
            change = generator.choice(
                [{}] * 12
                + [{"max_tokens": 500}, {"prompt": [10**6]}, {"sampling": Sampling(temp=-1)}]
            )
            try:
                request = engine.submit(
                    **{"prompt": prompts[number], "max_tokens": count, **change}
                )
            except KVCacheError:
                assert change
                refused += 1
                continue
            assert not change
            accepted.append((request, whole[number][:count]))
        if accepted and generator.random() < 0.15:
            generator.choice(accepted[-12:])[0].cancel()
        engine.step()
        cache = engine.cache
        assert cache.used + sum(
            request.max_tokens - len(request.tokens) for request in engine.active
        ) <= cache.capacity + len(engine.active)
        assert len(cache.sequences) == len(engine.active)
    reasons = Counter(request.finish_reason for request, _ in accepted)
    assert set(reasons) == {"length", "cancelled"}
    assert reasons["cancelled"] > 30
    assert refused > 50
    for request, expected in accepted:
        if request.finish_reason == "length":
            assert request.tokens == expected
        else:
            assert request.tokens == expected[: len(request.tokens)]
    metrics = engine.metrics
    assert metrics.finished == reasons["length"]
    assert metrics.refused == refused
    assert (engine.cache.used, engine.cache.sequences) == (0, ())
    engine.compact()
    assert engine.cache.nbytes == 0
    mx.clear_cache()
    assert mx.get_active_memory() <= baseline + 4096
