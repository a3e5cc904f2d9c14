"""Drives the op and the brute-force oracle with the same random steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlx_kvcache import CacheConfig, CacheGeometry, LayerGeometry, LayerPolicy, MLXSequenceCache
from mlx_kvcache.control.op import update_and_attend
from tests.support.brute_force_attention import History

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
#: What computing in float32 may cost: the oracle rounds rows as the cache stores them.
CLOSE = 1e-5


@dataclass(frozen=True)
class Layer:
    """One cache layer and how its queries read it. readers: model layers that share it."""

    window: int = 0
    kv_heads: int = 1
    group: int = 1
    key_dim: int = 3
    value_dim: int = 2
    readers: int = 1
    softcap: float | None = None
    sinks: bool = False

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    def geometry(self) -> LayerGeometry:
        policy = LayerPolicy.from_window(self.window)
        shared = self.readers > 1
        return LayerGeometry(policy, self.kv_heads, self.key_dim, self.value_dim, shared)


def make_cache(
    layers: Sequence[Layer],
    *,
    spare: int = 3,
    kv_dtype: str | None = None,
    initial_capacity: int = 4,
    capacity: int = 500,
    form: str = "array",
) -> MLXSequenceCache:
    geometry = CacheGeometry(tuple(layer.geometry() for layer in layers))
    with patch.dict(os.environ, MLX_KVCACHE_START=form):
        return MLXSequenceCache(geometry, CacheConfig(capacity, kv_dtype, initial_capacity, spare))


def observe(cache: MLXSequenceCache) -> list[Any]:
    """All that can be seen of a cache, with the bytes that it holds."""
    seen: list[Any] = [cache.length, cache.layout.high_water, cache.rewind_floor]
    for layer in cache.layers:
        seen.append((layer.offset, layer.rows))
        for array in (layer.keys, layer.values):
            if array is not None:
                words = array.view(mx.uint16) if array.dtype.size == 2 else array
                seen.append((array.shape, str(array.dtype), np.array(words).tobytes()))
    return seen


def draw(random: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(random.standard_normal(shape).astype(np.float32))


def step_rows(
    layer: Layer, random: np.random.Generator, batch: int, tokens: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Random queries, keys and values of one step."""
    return (
        draw(random, batch, layer.query_heads, tokens, layer.key_dim),
        draw(random, batch, layer.kv_heads, tokens, layer.key_dim),
        draw(random, batch, layer.kv_heads, tokens, layer.value_dim),
    )


def positions_as(form: str, start: int, tokens: int) -> Any:
    """The positions of a step in one of the forms that callers give."""
    run = list(range(start, start + tokens))
    forms = {
        "int": start,
        "numpy int": np.int64(start),
        "scalar": mx.array(start),
        "list": run,
        "column list": [[place] for place in run],
        "numpy": np.array(run, np.uint32),
        "array": mx.array(run, dtype=mx.int32),
        "column": mx.array(run, dtype=mx.int64)[:, None],
    }
    return forms[form]


POSITION_FORMS = (
    "int",
    "numpy int",
    "scalar",
    "list",
    "column list",
    "numpy",
    "array",
    "column",
)


class Duel:
    """One cache under the op, and the history of every layer under the oracle."""

    def __init__(self, layers: Sequence[Layer], batch: int, seed: int, **choices: Any) -> None:
        self.layers = tuple(layers)
        self.batch = batch
        self.random = np.random.default_rng(seed)
        self.cache = make_cache(layers, **choices)
        kv_dtype = choices.get("kv_dtype")
        dtype = None if kv_dtype is None else DTYPES[kv_dtype]
        self.histories = [History(layer.window, dtype) for layer in layers]
        self.length = 0

    def step(self, tokens: int, form: str = "int") -> None:
        """One step of all layers, each asked by all of its readers."""
        positions = positions_as(form, self.length, tokens)
        for index, layer in enumerate(self.layers):
            for reader in range(layer.readers):
                self._ask(index, layer, tokens, positions, is_writer=reader == 0)
        self.length += tokens

    def _ask(
        self, index: int, layer: Layer, tokens: int, positions: Any, *, is_writer: bool
    ) -> None:
        queries, keys, values = step_rows(layer, self.random, self.batch, tokens)
        sinks = draw(self.random, layer.query_heads) if layer.sinks else None
        scale = 0.25 + float(self.random.random())
        history = self.histories[index]
        if is_writer:
            history.write(self.length, keys, values)
        before = None if is_writer else observe(self.cache)
        # A reader's own keys and values are noise here: they must not be written nor read.
        answer = update_and_attend(
            queries,
            keys,
            values,
            positions,
            index,
            scale,
            cache=self.cache,
            sinks=sinks,
            softcap=layer.softcap,
        )
        expected = history.attend(self.length, queries, scale, sinks, layer.softcap)
        got = np.array(answer)
        assert answer.dtype == mx.float32
        assert got.shape == expected.shape
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() < CLOSE, f"layer {index} at {self.length}+{tokens}"
        if before is not None:
            assert observe(self.cache) == before, "reading again has written"

    def rewind(self, position: int) -> None:
        self.cache.rewind(position)
        for history in self.histories:
            history.rewind(position)
        self.length = position
