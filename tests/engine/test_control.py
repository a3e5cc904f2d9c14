"""The engine's cache is one of the control plane: of any kind, by a key that it gives back."""

from __future__ import annotations

import gc
import weakref

import pytest

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.control.factory import FACTORY, MLX
from mlx_kvcache.control.protocols import SharedControl, StepBackend
from mlx_kvcache.control.registry import REGISTRY
from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import NonFiniteError, SessionError
from tests.engine.test_failures import POISON, clean, poisoned
from tests.support.engine_runs import KINDS, alone, prompts_of, run, tiny

COUNT = 6


class Minimal:
    """What the two protocols ask for and nothing else, over a cache of ours."""

    def __init__(self, geometry, config) -> None:
        self._cache = MLXBatchedSequenceCache(geometry, config)

    def __getattr__(self, name):
        if name not in dir(SharedControl) and name not in dir(StepBackend):
            raise AttributeError(name)
        return getattr(self._cache, name)


FACTORY.register(MLX, "minimal", Minimal)


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_lasts_as_long_as_the_engine(kind):
    before = REGISTRY.keys()
    with Engine(tiny("llama"), 100, kind) as engine:
        (key,) = set(REGISTRY.keys()) - set(before)
        assert REGISTRY.get(key) is engine.cache
        session = engine.open()
        running = session.submit([1, 2, 3], max_tokens=COUNT)
        waiting = engine.submit([4], max_tokens=95)
        engine.step()
    assert REGISTRY.keys() == before
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert session.sequence is None
    assert (engine.cache.used, engine.cache.sequences) == (0, ())
    assert [event.finish_reason for event in engine.step() if event.finish_reason] == [
        "cancelled",
        "cancelled",
    ]
    engine.shutdown()
    for refused in (engine.open, lambda: engine.submit([1], max_tokens=2)):
        with pytest.raises(SessionError, match="shut down"):
            refused()


def test_an_engine_that_is_dropped_gives_its_key_back():
    before = REGISTRY.keys()
    engine = Engine(tiny("llama"), 100)
    session = engine.open()
    session.submit([1, 2, 3], max_tokens=COUNT)
    run(engine)
    assert len(REGISTRY.keys()) == len(before) + 1
    gc.collect()
    gc.disable()
    try:
        there = weakref.ref(engine)
        del engine
        # A session is of use as long as it is there.
        assert there() is not None
        del session
        assert there() is None, "an idle engine is in no circle"
    finally:
        gc.enable()
    assert REGISTRY.keys() == before


def test_an_engine_that_is_dropped_with_requests_gives_its_key_back():
    before = REGISTRY.keys()
    engine = Engine(tiny("llama"), 100)
    engine.submit([1, 2, 3], max_tokens=COUNT)
    engine.step()
    del engine
    gc.collect()
    assert REGISTRY.keys() == before


def test_a_refused_kind_leaves_no_key():
    before = REGISTRY.keys()
    for kind in ("sequence", "paged"):
        with pytest.raises(Exception, match=kind if kind == "paged" else "share"):
            Engine(tiny("llama"), 100, kind)
    assert REGISTRY.keys() == before


def test_a_kind_of_somebody_elses_runs():
    model = poisoned("llama", float("nan"))
    prefix, *prompts = clean(prompts_of("llama", (12, 9, 5), seed=8))
    engine = Engine(model, 200, "minimal", step_tokens=8, max_active=4)
    assert engine.cache_kind == "minimal"
    parent = engine.open()
    parent.submit(prefix, max_tokens=0)
    requests = [engine.submit(prompt, max_tokens=COUNT, parent=parent) for prompt in prompts]
    failing = engine.submit([1, POISON], max_tokens=COUNT)
    run(engine)
    expected = [alone(model, [*prefix, *prompt], COUNT) for prompt in prompts]
    assert POISON not in [token for tokens in expected for token in tokens]
    assert [request.tokens for request in requests] == expected
    assert isinstance(failing.error, NonFiniteError)
    engine.compact()
    parent.close()
    assert engine.cache.used == 0
