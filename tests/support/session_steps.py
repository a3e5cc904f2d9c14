"""Steps of a cache, and threads that report their failures."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kvcache import MLXSequenceCache
from tests.support.plain_cache import GEOMETRY


def write(cache: MLXSequenceCache, value: float, tokens: int = 1) -> None:
    rows = mx.full((1, 1, tokens, 4), value) + cache.length
    for layer in range(len(GEOMETRY.layers)):
        cache.layer(layer).update_and_fetch(rows, -rows)


def held(cache: MLXSequenceCache) -> list[Any]:
    return [np.array(array).tolist() for layer in cache.layers for array in layer.keys_and_values()]


def run_all(calls: list[Any]) -> None:
    failures: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    # A context of its own for each: some builds of Python let threads inherit one.
    threads = [
        threading.Thread(target=contextvars.Context().run, args=(guarded, call)) for call in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
