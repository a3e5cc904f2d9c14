"""The storage dtype: rows are rounded once, and come back the same however they were chunked."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from tests.support.arrays import numbers, raw
from tests.support.sequence_oracle import DTYPES, FORMS, make_cache, rounded, simple_geometry

LENGTH = 31
CHUNKINGS = {
    "one by one": [1] * LENGTH,
    "sevens": [7, 7, 7, 7, 1, 1, 1],
    "a wide one": [29, 1, 1],
    "wide ones behind a wrap": [1, 2, 17, 10, 1],
}


def stream() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    outer = (2, 2, LENGTH)
    return tuple(random.standard_normal((*outer, dim)).astype(np.float32) for dim in (3, 2))


def fed(
    geometry: CacheGeometry, kv_dtype: str | None, form: str, chunks: list[int], given: mx.Dtype
) -> dict[tuple[int, int], list[bytes]]:
    """What each (layer, position) was answered with for itself and the rows before it."""
    keys, values = (mx.array(part).astype(given) for part in stream())
    cache = make_cache(geometry, CacheConfig(64, kv_dtype, 4, 3), form)
    answered: dict[tuple[int, int], list[bytes]] = {}
    start = 0
    for count in chunks:
        part = slice(start, start + count)
        for index, layer in enumerate(geometry.layers):
            rows = cache.layer(index).update_and_fetch(keys[:, :, part], values[:, :, part])
            assert [array.dtype for array in rows] == [given, given]
            total = rows[0].shape[2]
            for query in range(count):
                end = total - count + query + 1
                seen = min(end, layer.policy.window or end)
                answered[index, start + query] = [
                    raw(array[:, :, end - seen : end])[2] for array in rows
                ]
        start += count
    for layer in cache.layers:
        assert layer.keys.dtype == (DTYPES[kv_dtype] if kv_dtype else given)
    return answered


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, *DTYPES])
def test_every_chunking_answers_the_same_bytes(kv_dtype: str | None, given: str) -> None:
    geometry = simple_geometry(0, 5, 1)
    answers = [
        fed(geometry, kv_dtype, form, chunks, DTYPES[given])
        for form, chunks in itertools.product(FORMS, CHUNKINGS.values())
    ]
    for other in answers[1:]:
        assert other == answers[0]
    keys, _ = stream()
    storage = DTYPES[kv_dtype or given]
    for position in range(LENGTH):
        # The last layer has a window of 1: it answers each position with its own row alone.
        answered, _ = answers[0][2, position]
        newest = rounded(keys[:, :, [position]], DTYPES[given], storage, DTYPES[given])
        row = raw(mx.array(newest).astype(DTYPES[given]))[2]
        assert answered == row


def test_a_narrow_storage_dtype_does_change_the_rows() -> None:
    geometry = simple_geometry(0, 5)
    chunks = CHUNKINGS["sevens"]
    exact = fed(geometry, None, "array", chunks, mx.float32)
    assert exact == fed(geometry, "float32", "array", chunks, mx.float32)
    half = fed(geometry, "float16", "array", chunks, mx.float32)
    brain = fed(geometry, "bfloat16", "array", chunks, mx.float32)
    assert len({str(each) for each in (exact, half, brain)}) == 3


def test_the_first_rows_decide_where_no_dtype_is_given() -> None:
    """Until a clear: later rows are rounded to the dtype in which the layer began."""
    cache = make_cache(simple_geometry(0), CacheConfig(64))
    keys, values = (mx.array(part) for part in stream())
    cache.layer(0).update_and_fetch(keys[:, :, :3].astype(mx.float16), values[:, :, :3])
    answer = cache.layer(0).update_and_fetch(keys[:, :, 3:5], values[:, :, 3:5].astype(mx.bfloat16))
    assert (cache.layers[0].keys.dtype, cache.layers[0].values.dtype) == (mx.float16, mx.float32)
    assert [array.dtype for array in answer] == [mx.float32, mx.bfloat16]
    assert (numbers(answer[0]) == rounded(np.array(keys[:, :, :5]), mx.float16)).all()
    cache.clear()
    cache.layer(0).update_and_fetch(keys[:, :, :3], values[:, :, :3])
    assert cache.layers[0].keys.dtype == mx.float32
