"""What the tracer reads off a model's caches, on models made for the purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import LayerGeometry, LayerPolicy, ModelLayer
from mlx_kvcache.integrations.tracing import is_kv_cache, leaves, trace_geometry, weight_bytes
from tests.support.tiny_models import all_families, build


class CachesOnly(nn.Module):
    """A model that makes the given caches and, run, hands them to `forward`."""

    def __init__(self, make: Callable[[], list[Any]], forward: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._make, self._forward = make, forward
        self.seen: list[tuple[int, ...]] = []

    def make_cache(self) -> list[Any]:
        return self._make()

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.seen.append(inputs.shape)
        self._forward(cache)
        return inputs


def write(cache: Any, heads: int = 2, key_dim: int = 8, value_dim: int = 8) -> None:
    cache.update_and_fetch(mx.zeros((1, heads, 1, key_dim)), mx.zeros((1, heads, 1, value_dim)))


def write_all(caches: list[Any]) -> None:
    for entry in caches:
        for cache in leaves(entry):
            if is_kv_cache(cache):
                write(cache)


def row(policy: LayerPolicy, *shape: int, shared: bool = False) -> LayerGeometry:
    return LayerGeometry(policy, *shape, shared=shared)


def test_each_kind_of_cache_gives_its_policy_and_shape() -> None:
    def forward(caches: list[Any]) -> None:
        write(caches[0], 1, 32, 16)
        write(caches[1][1], 3, 8, 4)
        write(caches[1][2], 1, 6, 0)
        write(caches[3], 2, 8, 8)

    model = CachesOnly(
        lambda: [
            KVCache(),
            CacheList(ArraysCache(2), RotatingKVCache(max_size=5), KVCache()),
            ArraysCache(1),
            ChunkedKVCache(7),
        ],
        forward,
    )
    traced = trace_geometry(model)
    assert traced.geometry.layers == (
        row(LayerPolicy.flat(), 1, 32, 16),
        row(LayerPolicy.ring(5), 3, 8, 4),
        row(LayerPolicy.flat(), 1, 6, 0),
        row(LayerPolicy.ring(7), 2, 8, 8),
    )
    assert traced.geometry.model_layers == (
        ModelLayer((0,)),
        ModelLayer((1, 2), recurrent=True),
        ModelLayer(recurrent=True),
        ModelLayer((3,)),
    )
    assert model.seen == [(1, 1)]


def test_a_trace_is_kept_until_what_it_was_taken_of_changes() -> None:
    model = build("gemma3_text", all_families()["gemma3_text"])
    passes = []
    original = type(model).__call__

    def call(self: Any, *arguments: Any, **choices: Any) -> Any:
        passes.append(self is model)
        return original(self, *arguments, **choices)

    with patch.object(type(model), "__call__", call):
        first, second = trace_geometry(model), trace_geometry(model)
        assert passes == [True]
        assert first.geometry is second.geometry
        assert first.template is not second.template
        assert second.weight_bytes == weight_bytes(model)
        twin = copy.deepcopy(model)
        assert trace_geometry(twin).geometry == first.geometry
        model.model.window_size = 5
        assert 5 not in first.geometry.windows
        trace_geometry(model)
        assert len([own for own in passes if own]) == 2
        model.model.layers = model.model.layers[:-1]
        model.args.num_hidden_layers -= 1
        assert len(trace_geometry(model).geometry.layers) == len(first.geometry.layers) - 1
    assert "_mlx_kvcache_trace" not in model


def test_the_template_is_fresh_and_keeps_the_structure() -> None:
    model = CachesOnly(
        lambda: [CacheList(ArraysCache(2), KVCache()), RotatingKVCache(4)],
        write_all,
    )
    template = trace_geometry(model).template
    assert [type(cache) for cache in template] == [CacheList, RotatingKVCache]
    assert [type(cache) for cache in leaves(template[0])] == [ArraysCache, KVCache]
    for cache in (template[0][1], template[1]):
        assert cache.empty()
        assert cache.offset == 0
        assert "update_and_fetch" not in vars(cache)


def test_only_mlx_lms_own_kv_caches_are_stood_in_for() -> None:
    class Odd(KVCache):
        pass

    assert is_kv_cache(KVCache())
    assert not is_kv_cache(Odd())
    assert not is_kv_cache(QuantizedKVCache())
    model = CachesOnly(lambda: [KVCache(), Odd()], write_all)
    assert trace_geometry(model).geometry.model_layers[1] == ModelLayer(recurrent=True)


@pytest.mark.parametrize("kind", [KVCache, lambda: RotatingKVCache(4), lambda: ChunkedKVCache(4)])
def test_rows_read_again_mark_their_layer_as_shared(kind: Callable[[], Any]) -> None:
    def forward(caches: list[Any]) -> None:
        write(caches[0])
        write(caches[1])
        caches[1].keys_and_values()

    layers = trace_geometry(CachesOnly(lambda: [kind(), kind()], forward)).geometry.layers
    assert [layer.shared for layer in layers] == [False, True]


def test_a_cache_that_keeps_its_first_rows_is_refused() -> None:
    model = CachesOnly(
        lambda: [KVCache(), RotatingKVCache(max_size=8, keep=4)],
        write_all,
    )
    with pytest.raises(GeometryError, match=r"KV cache 1 .*first 4 rows.*keep != 0"):
        trace_geometry(model)
    model._make = lambda: [KVCache(), RotatingKVCache(max_size=8, keep=0)]
    assert trace_geometry(model).geometry.windows == (0, 8)


def test_a_cache_that_is_never_written_stays_mlx_lms() -> None:
    model = CachesOnly(
        lambda: [KVCache(), KVCache(), RotatingKVCache(4)],
        lambda caches: (write(caches[0]), write(caches[2])),
    )
    traced = trace_geometry(model)
    assert traced.geometry.windows == (0, 4)
    assert traced.geometry.model_layers == (ModelLayer((0,)), ModelLayer(), ModelLayer((1,)))
    assert traced.written == (True, False, True)
    entries = traced.with_layers(["first", "second"])
    assert entries == ["first", traced.template[1], "second"]


def test_a_ring_holds_what_the_models_mask_lets_a_query_see() -> None:
    def forward(caches: list[Any]) -> None:
        caches[0].make_mask(1, window_size=6, return_array=False)
        caches[2].make_mask(1, window_size=3, return_array=False)
        write_all(caches)

    kinds = (5, 5, 4, 0)
    model = CachesOnly(
        lambda: [RotatingKVCache(size) if size else KVCache() for size in kinds], forward
    )
    assert trace_geometry(model).geometry.windows == (6, 6, 4, 0)


def test_keys_and_values_of_different_heads_are_refused() -> None:
    def forward(caches: list[Any]) -> None:
        caches[0].keys = mx.zeros((1, 2, 4, 8))
        caches[0].values = mx.zeros((1, 4, 4, 8))

    with pytest.raises(GeometryError, match="same batch size and KV heads"):
        trace_geometry(CachesOnly(lambda: [KVCache()], forward))


def test_a_model_without_kv_caches_is_refused() -> None:
    for caches in ([ArraysCache(2)], []):
        model = CachesOnly(lambda made=caches: made, lambda _: None)
        with pytest.raises(GeometryError, match="no KV cache"):
            trace_geometry(model)


@pytest.mark.usefixtures("collected")
def test_nothing_is_evaluated() -> None:
    # Each of its matrices would take 256 GiB; only a lazy forward survives it.
    config = {
        "model_type": "llama",
        "hidden_size": 2**18,
        "num_hidden_layers": 2,
        "intermediate_size": 2**18,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 2**18,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 9,
    }
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = llama.Model(llama.ModelArgs.from_dict(config))
    layers = trace_geometry(model).geometry.layers
    assert layers == (
        row(LayerPolicy.flat(), 4, 4096, 4096),
        row(LayerPolicy.ring(9), 4, 4096, 4096),
    )
    assert mx.get_peak_memory() < before + 2**20
    # The measure does move when something is evaluated.
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.ones(2**20))
    assert mx.get_peak_memory() >= before + 2**22
