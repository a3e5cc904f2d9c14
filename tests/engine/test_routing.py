"""The routing of attention: only while a step runs, only in its own thread."""

from __future__ import annotations

import sys
import threading

import mlx.core as mx
import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import StepError
from mlx_kvcache.integrations.attention import ATTENTION, FlatModel
from tests.support.engine_runs import alone, prompts_of, run, tiny


def test_the_models_own_attention_comes_back():
    module = sys.modules[type(tiny("llama")).__module__]
    before = getattr(module, ATTENTION)
    model = FlatModel(tiny("llama"))
    assert getattr(module, ATTENTION) is before
    engine = Engine(tiny("llama"), 32)
    with pytest.raises(StepError):
        model.forward(engine.cache, mx.array([1]))
    assert getattr(module, ATTENTION) is before
    engine.submit([1, 2], max_tokens=2)
    run(engine)
    assert getattr(module, ATTENTION) is before


@pytest.mark.slow
def test_two_engines_and_a_lone_sequence_in_three_threads():
    """Each thread has its own model and cache, but all share the module that is replaced."""
    from tests.support.tiny_models import all_families, build

    prompts = prompts_of("llama", (9, 14, 6))
    expected = [alone(tiny("llama"), prompt, 24) for prompt in prompts]
    got: dict[str, list[list[int]]] = {}

    def work(name: str) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            model = build("llama", all_families()["llama"])
            for _ in range(3):
                if name == "alone":
                    answers = [alone(model, prompt, 24) for prompt in prompts]
                else:
                    engine = Engine(model, 200, name)
                    requests = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
                    run(engine)
                    answers = [request.tokens for request in requests]
                got.setdefault(name, []).extend(answers)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("cell", "batched", "alone")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(("cell", "batched", "alone"), expected * 3)


def test_layers_that_others_read_again_are_marked():
    geometry = FlatModel(tiny("gemma4_text")).geometry
    assert any(layer.shared for layer in geometry.layers)
    assert not any(layer.shared for layer in FlatModel(tiny("llama")).geometry.layers)


def test_a_window_that_only_the_mask_has_is_found():
    """mistral3 keeps flat caches, and masks some of them."""
    from mlx_kvcache.integrations.tracing import trace_geometry

    model = tiny("mistral3")
    assert FlatModel(model).geometry.windows != trace_geometry(model).geometry.windows
