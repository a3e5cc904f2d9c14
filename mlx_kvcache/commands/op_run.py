"""Run the attention op step by step, and compare each answer with the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kvcache.commands.op_request import Array, OpRequest
from mlx_kvcache.control.attention_oracle import AttentionOracle
from mlx_kvcache.control.op import update_and_attend
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.facts.layer_kinds import summary


@dataclass(frozen=True)
class OpResult:
    """One step of one layer.

    error: the largest difference from the oracle, which rounds keys and values to the storage
    dtype as the cache does. storage_error: what that rounding alone changes. tolerance: what
    `error` may be.
    """

    step: int
    layer: int
    window: int
    position: int
    tokens: int
    error: float
    storage_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; one that is not a number is not."""
        return self.error <= self.tolerance


def run(request: OpRequest) -> Iterator[OpResult]:
    """The result of every step and layer, in the order in which a model would call the op."""
    stored = AttentionOracle(request.geometry, request.config.kv_dtype)
    exact = AttentionOracle(request.geometry)
    # A row that outweighs the others passes its own size on to the answer.
    largest = float(np.abs(request.tensors.values).max())
    tolerance = request.tolerance * max(1.0, largest)
    with CacheSession(request.geometry, request.config):
        position = 0
        for step, tokens in enumerate(request.steps):
            for layer, window in enumerate(request.geometry.windows):
                answer = _answer(request, layer, position, tokens)
                truth = _oracle(stored, request, layer, position, tokens)
                ideal = _oracle(exact, request, layer, position, tokens)
                yield OpResult(
                    step,
                    layer,
                    window,
                    position,
                    tokens,
                    float(np.abs(answer - truth).max()),
                    float(np.abs(truth - ideal).max()),
                    tolerance,
                )
            position += tokens


def _rows(request: OpRequest, layer: int, position: int, tokens: int) -> tuple[Array, Array, Array]:
    tensors = request.tensors
    rows = slice(position, position + tokens)
    return (
        tensors.queries[layer][:, :, rows],
        tensors.keys[layer][:, :, rows],
        tensors.values[layer][:, :, rows],
    )


def _answer(request: OpRequest, layer: int, position: int, tokens: int) -> Array:
    rows = _rows(request, layer, position, tokens)
    queries, keys, values = (mx.array(array) for array in rows)
    sinks = request.tensors.sinks
    answer = update_and_attend(
        queries,
        keys,
        values,
        position,
        layer,
        request.scale,
        sinks=None if sinks is None else mx.array(sinks),
        softcap=request.softcap,
    )
    return np.array(answer)


def _oracle(
    oracle: AttentionOracle, request: OpRequest, layer: int, position: int, tokens: int
) -> Array:
    queries, keys, values = _rows(request, layer, position, tokens)
    return oracle.step(
        layer,
        queries,
        keys,
        values,
        request.scale,
        sinks=request.tensors.sinks,
        softcap=request.softcap,
    )


def result_line(result: OpResult) -> str:
    """One result for a person."""
    kind = f"ring {result.window}" if result.window else "flat"
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
    return f"{verdict} the tolerance {results[0].tolerance:.2e}; max abs error {worst:.2e}"


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
                "max_abs_error": _finite(result.error),
                "storage_error": _finite(result.storage_error),
                "passed": result.passed,
            }
            for result in results
        ],
    }


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None
