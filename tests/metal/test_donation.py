"""Whether a write finds its buffer free while steps are in flight, by the memory that they take.

A GPU keeps the buffers of a step until its command buffer is done. A step that is submitted
before then finds the pool in use, and MLX copies it before it writes.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy

ROWS, HEADS, DIM, STEPS = 8192, 8, 128, 24
POOL = HEADS * ROWS * DIM * 2


def extra_bytes(in_flight: int) -> int:
    """The most that decode steps take beside the cache, `in_flight` of them not awaited."""
    layer = LayerGeometry(LayerPolicy.flat(), HEADS, DIM, DIM)
    config = CacheConfig(capacity=ROWS, initial_capacity=ROWS)
    cache = MLXSequenceCache(CacheGeometry((layer,)), config)
    row = mx.ones((1, HEADS, 1, DIM), mx.bfloat16)
    query = mx.ones((1, HEADS, 1, DIM), mx.bfloat16)
    cache.layer(0).update_and_fetch(row, row)
    mx.eval(cache.state)
    assert cache.nbytes == 2 * POOL
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    waiting: list[mx.array] = []
    for _ in range(STEPS):
        keys, values = cache.layer(0).update_and_fetch(row, row)
        answer = mx.fast.scaled_dot_product_attention(query, keys, values, scale=1.0)
        mx.async_eval(answer, cache.state)
        del keys, values
        waiting.append(answer)
        if len(waiting) > in_flight:
            mx.eval(waiting.pop(0))
    mx.eval(waiting)
    return int(mx.get_peak_memory()) - before


def show(found: dict[int, int]) -> str:
    return ", ".join(f"{n} in flight: +{size / 2**20:.0f} MiB" for n, size in found.items())


def most_bytes(in_flight: int) -> int:
    """A copy of both pools for each step in flight, and one more that is being made."""
    return (in_flight + 1) * 2 * POOL + POOL // 2


def test_awaited_steps_write_in_place() -> None:
    assert extra_bytes(0) < POOL // 2


@pytest.mark.slow
def test_steps_in_flight_take_a_copy_each_at_the_most() -> None:
    found = {in_flight: extra_bytes(in_flight) for in_flight in (1, 4)}
    assert all(size < most_bytes(in_flight) for in_flight, size in found.items()), show(found)


@pytest.mark.metal_gpu
@pytest.mark.skipif(not mx.metal.is_available(), reason="this MLX has no Metal")
def test_what_steps_in_flight_cost_on_a_gpu() -> None:
    """Prints what it measures; mlx-lm's loop is one step ahead."""
    found = {in_flight: extra_bytes(in_flight) for in_flight in (0, 1, 2, 4, 8)}
    print(show(found))
    assert found[0] < POOL // 2, show(found)
    assert all(size < most_bytes(in_flight) for in_flight, size in found.items()), show(found)
