"""Run the attention op step by step, and compare each answer with a plain recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_kvcache.cache.attention import AttendSpec, attend
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.commands.figures import ring_wraps, wraps_text
from mlx_kvcache.commands.op_request import Array, OpRequest
from mlx_kvcache.control.op import update_and_attend
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.facts.layer_kinds import summary
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.sequence import SequenceLayout


@dataclass(frozen=True)
class OpResult:
    """One step of one layer.

    error: the largest difference from the recomputation, which rounds keys and values to the
    storage dtype as the cache does. storage_error: what that rounding alone changes. tolerance:
    what `error` may be. wraps: how often the layer's ring has wrapped by then.
    """

    step: int
    layer: int
    window: int
    position: int
    tokens: int
    error: float
    storage_error: float
    tolerance: float
    wraps: int

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; one that is not a number is not."""
        return self.error <= self.tolerance


def run(request: OpRequest) -> Iterator[OpResult]:
    """The result of every step and layer, in the order in which a model would call the op."""
    # A row that outweighs the others passes its own size on to the answer.
    largest = float(np.abs(request.tensors.values).max())
    tolerance = request.tolerance * max(1.0, largest)
    with CacheSession(request.geometry, request.config) as session:
        layout = cast(MLXSequenceCache, session.cache).layout
        position = 0
        for step, tokens in enumerate(request.steps):
            for layer, window in enumerate(request.geometry.windows):
                answer = _answer(request, layer, position, tokens)
                truth = recomputed(request, layer, position, tokens, request.config.kv_dtype)
                ideal = recomputed(request, layer, position, tokens)
                yield OpResult(
                    step,
                    layer,
                    window,
                    position,
                    tokens,
                    float(np.abs(answer - truth).max()),
                    float(np.abs(truth - ideal).max()),
                    tolerance,
                    _wraps(layout, layer),
                )
            position += tokens


def _wraps(layout: SequenceLayout, layer: int) -> int:
    ring = layout.layers[layer]
    return ring_wraps(ring, layout.high_water) if isinstance(ring, RingLayout) else 0


def _answer(request: OpRequest, layer: int, position: int, tokens: int) -> Array:
    tensors, step = request.tensors, slice(position, position + tokens)
    arrays = (tensors.queries, tensors.keys, tensors.values)
    queries, keys, values = (mx.array(array[layer][:, :, step]) for array in arrays)
    return np.array(
        update_and_attend(
            queries, keys, values, position, layer, request.scale, **_options(request)
        )
    )


def recomputed(
    request: OpRequest, layer: int, position: int, tokens: int, kv_dtype: str | None = None
) -> Array:
    """The answer to a step over all rows so far, without a cache, in float32.

    kv_dtype: what keys and values are rounded to first.
    """
    tensors, end = request.tensors, position + tokens
    queries = mx.array(tensors.queries[layer][:, :, position:end])
    keys, values = (mx.array(array[layer][:, :, :end]) for array in (tensors.keys, tensors.values))
    if kv_dtype is not None:
        dtype = getattr(mx, kv_dtype)
        keys, values = (rows.astype(dtype).astype(mx.float32) for rows in (keys, values))
    mask = mx.array(visible(position, tokens, request.geometry.windows[layer]))
    spec = AttendSpec("explicit", mask)
    return np.array(attend(queries, keys, values, spec, request.scale, **_options(request)))


def visible(start: int, tokens: int, window: int) -> Array:
    """Which of the positions 0 .. start + tokens - 1 each query sees: bool [T, start + T].

    The query at position p sees p and what is before it; with a window, only its newest positions.
    """
    queries = np.arange(start, start + tokens)[:, None]
    rows = np.arange(start + tokens)[None]
    seen = rows <= queries
    return seen & (rows > queries - window) if window else seen


def _options(request: OpRequest) -> dict[str, Any]:
    sinks = request.tensors.sinks
    return {"sinks": None if sinks is None else mx.array(sinks), "softcap": request.softcap}


def result_line(result: OpResult) -> str:
    """One result for a person."""
    kind = f"ring {result.window}" if result.window else "flat"
    if result.wraps:
        kind += f", {wraps_text(result.wraps)}"
    last = result.position + result.tokens - 1
    line = (
        f"step {result.step} (positions {result.position}-{last}) layer {result.layer} ({kind}): "
        f"max abs error {result.error:.2e}"
    )
    if result.storage_error:
        line += f", storage rounding {result.storage_error:.2e}"
    return line if result.passed else f"{line}  ABOVE {result.tolerance:.2e}"


def verdict_line(results: list[OpResult]) -> str:
    """What it comes to, for a person."""
    worst = max((result.error for result in results), key=lambda error: (error != error, error))
    failed = sum(not result.passed for result in results)
    verdict = f"{failed} of {len(results)} ABOVE" if failed else f"all {len(results)} within"
    line = f"{verdict} the tolerance {results[0].tolerance:.2e}; max abs error {worst:.2e}"
    return f"{line}{_rings_text(results)}"


def _rings_text(results: list[OpResult]) -> str:
    wraps = {result.window: result.wraps for result in results if result.window}
    return "".join(f"; ring {window} {wraps_text(wraps[window])}" for window in sorted(wraps))


def facts(request: OpRequest, results: list[OpResult]) -> dict[str, Any]:
    """The whole run as one JSON object. An error that is not a number is null."""
    return {
        "passed": all(result.passed for result in results),
        "tolerance": results[0].tolerance,
        "scale": request.scale,
        "softcap": request.softcap,
        "sinks": request.tensors.sinks is not None,
        "query_heads": int(request.tensors.queries.shape[2]),
        "batch": int(request.tensors.queries.shape[1]),
        "cache": {
            "summary": summary(request.geometry),
            "capacity": request.config.capacity,
            "kv_dtype": request.config.kv_dtype,
            "spare": request.config.spare,
            "windows": list(request.geometry.windows),
            "kv_heads": request.geometry.layers[0].kv_heads,
            "key_dim": request.geometry.layers[0].key_dim,
            "value_dim": request.geometry.layers[0].value_dim,
        },
        "device": str(mx.default_device()),
        "results": [
            {
                "step": result.step,
                "layer": result.layer,
                "position": result.position,
                "tokens": result.tokens,
                "wraps": result.wraps,
                "max_abs_error": _finite(result.error),
                "storage_error": _finite(result.storage_error),
                "passed": result.passed,
            }
            for result in results
        ],
    }


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None
