"""The routing of attention: only in a step, only in its own thread."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention as base_attention
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from mlx_kvcache import CacheConfig, MLXCellCache
from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import StepError
from mlx_kvcache.integrations.attention import ATTENTION, FlatModel, _Layer
from tests.support.engine_runs import alone, prompts_of, run, tiny
from tests.support.interrupts import Fuse


def test_outside_a_step_the_models_own_attention_answers():
    module = sys.modules[type(tiny("llama")).__module__]
    prompt = prompts_of("llama", (9,))[0]
    first = Engine(tiny("llama"), 32)
    wrapper = getattr(module, ATTENTION)
    assert wrapper.__wrapped__ is base_attention
    with pytest.raises(StepError):
        FlatModel(tiny("llama")).forward(first.cache, mx.array([1]))
    expected = logits_alone(prompt)
    with patch.object(module, ATTENTION, base_attention):
        assert logits_alone(prompt) == expected
    assert logits_alone([*prompt[:-1], prompt[-1] ^ 1]) != expected
    second = Engine(tiny("llama"), 32)
    second.submit([1, 2], max_tokens=2)
    run(second)
    assert getattr(module, ATTENTION) is wrapper


def test_an_attention_that_others_replaced_is_wrapped_in_turn():
    module = sys.modules[type(tiny("llama")).__module__]
    engine = Engine(tiny("llama"), 64)
    prompt = prompts_of("llama", (9,))[0]
    calls = []

    def theirs(*arguments, **others):
        calls.append(others)
        return base_attention(*arguments, **others)

    with patch.object(module, ATTENTION, theirs):
        request = engine.submit(prompt, max_tokens=4)
        run(engine)
        assert not calls
        assert request.tokens == alone(tiny("llama"), prompt, 4)
        assert calls


def test_an_attention_that_others_made_of_the_wrapper_is_wrapped_in_turn():
    """`functools.wraps` copies all attributes."""
    module = sys.modules[type(tiny("llama")).__module__]
    engine = Engine(tiny("llama"), 64)
    prompt = prompts_of("llama", (9,))[0]

    @functools.wraps(getattr(module, ATTENTION))
    def theirs(*arguments, **others):
        return base_attention(*arguments, **others)

    with patch.object(module, ATTENTION, theirs):
        for each in (engine, Engine(tiny("llama"), 64)):
            request = each.submit(prompt, max_tokens=4)
            run(each)
            assert request.tokens == alone(tiny("llama"), prompt, 4)


def test_a_module_that_is_imported_anew_is_not_looked_for():
    name = type(tiny("llama")).__module__
    prompt = prompts_of("llama", (9,))[0]
    engine = Engine(tiny("llama"), 64)
    with patch.dict(sys.modules):
        del sys.modules[name]
        request = engine.submit(prompt, max_tokens=4)
        run(engine)
    assert request.tokens == alone(tiny("llama"), prompt, 4)


def test_an_interrupted_step_blocks_nobody():
    """At every point of it: then one sequence alone in this thread, and an engine in another."""
    prompt = prompts_of("llama", (9,))[0]
    expected, answer = logits_alone(prompt), alone(tiny("llama"), prompt, 2)
    model, engine = FlatModel(tiny("llama")), Engine(tiny("llama"), 32)
    places = set()
    for at in range(0, 100_000, 3):
        cache = MLXCellCache(model.geometry, CacheConfig(16))
        cache.declare_step([(cache.new(), 2)])
        fuse = Fuse(at)
        try:
            fuse.call(lambda cache=cache: model.forward(cache, mx.array([1, 2])))
        except KeyboardInterrupt:
            assert fuse.place is not None
            places.add(fuse.place)
        else:
            break
        assert logits_alone(prompt) == expected
        if fuse.place[0].endswith("attention.py"):
            request = engine.submit(prompt, max_tokens=2)
            thread = threading.Thread(target=run, args=(engine,), daemon=True)
            thread.start()
            thread.join(60)
            assert request.tokens == answer
    assert sum(name.endswith("attention.py") for name, _ in places) > 10


def logits_alone(prompt: list[int]) -> bytes:
    """The logits of a prompt on mlx-lm's own caches."""
    model = tiny("llama")
    return bytes(model(mx.array([prompt]), cache=make_mlx_lm_cache(model)))


@pytest.mark.slow
def test_two_engines_and_a_lone_sequence_in_three_threads():
    """Each thread has its own model and cache, but all share the module that is wrapped."""
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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_fails_keeps_no_rows(monkeypatch, error):
    model, attend = FlatModel(tiny("llama")), MLXCellCache.attend
    cache = MLXCellCache(model.geometry, CacheConfig(16))
    rows = []

    def failing(self, layer, queries, keys, *others):
        if layer == 1:
            raise error
        return attend(self, layer, queries, keys, *others)

    update = _Layer.update_and_fetch

    def noting(self, keys, values):
        rows.append(weakref.ref(keys))
        return update(self, keys, values)

    monkeypatch.setattr(MLXCellCache, "attend", failing)
    monkeypatch.setattr(_Layer, "update_and_fetch", noting)
    cache.declare_step([(cache.new(), 2)])
    with pytest.raises(error):
        model.forward(cache, mx.array([1, 2]))
    gc.collect()
    assert len(rows) == 2
    assert all(row() is None for row in rows)


def test_layers_that_others_read_again_are_marked():
    geometry = FlatModel(tiny("gemma4_text")).geometry
    assert any(layer.shared for layer in geometry.layers)
    assert not any(layer.shared for layer in FlatModel(tiny("llama")).geometry.layers)


def test_a_window_that_only_the_mask_has_is_found():
    """mistral3 keeps flat caches, and masks some of them."""
    from mlx_kvcache.integrations.tracing import trace_geometry

    model = tiny("mistral3")
    assert FlatModel(model).geometry.windows != trace_geometry(model).geometry.windows
