"""The figures of one answer, as lines for a person and as facts for a program."""

from __future__ import annotations

import math
import resource
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.chat.generation import Generation
from mlx_kvcache.chat.text import spell
from mlx_kvcache.commands.console import versions
from mlx_kvcache.commands.figures import layer_facts, rate_text, ring_facts, rings_text, size_text
from mlx_kvcache.commands.options import RunOptions
from mlx_kvcache.facts.config import MAX_CAPACITY
from mlx_kvcache.facts.layer_kinds import summary
from mlx_kvcache.integrations.sampling import sampling_facts


def peak_process_bytes() -> int:
    """The most memory that this process had resident at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def cache_line(cache: MLXSequenceCache) -> str:
    """Layers, positions and bytes of a cache, and how often its rings wrapped."""
    capacity = "unlimited" if cache.capacity == MAX_CAPACITY else str(cache.capacity)
    line = (
        f"cache   {summary(cache.geometry)} layers, {cache.length}/{capacity} positions, "
        f"{size_text(cache.nbytes_used)} used of {size_text(cache.nbytes)} held"
    )
    rings = rings_text(cache.layout)
    return f"{line}; {rings}" if rings else line


def memory_line() -> str:
    """What MLX and the whole process hold, and held at most."""
    return (
        f"memory  MLX {size_text(mx.get_active_memory())} active, "
        f"{size_text(mx.get_peak_memory())} peak; process peak {size_text(peak_process_bytes())}"
    )


def report_lines(generation: Generation) -> list[str]:
    """Cache, memory and speed, one line each."""
    lines = [cache_line(generation.cache.sequence), memory_line()]
    first = generation.first_token_seconds
    if first is not None and generation.seconds is not None:
        lines.append(
            f"speed   prefill {len(generation.prompt)} tokens at "
            f"{rate_text(generation.prefill_tokens_per_second)}, first token after {first:.2f} s; "
            f"decode {len(generation.token_ids)} tokens at "
            f"{rate_text(generation.decode_tokens_per_second)}"
        )
    return lines


def report_facts(generation: Generation, options: RunOptions) -> dict[str, Any]:
    """Everything about one answer. Bytes, seconds and tokens per second; null is unknown."""
    return {
        "model": options.model,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "logprobs": _logprob_facts(generation),
        "finish_reason": generation.finish_reason,
        "stop_text": generation.stopped_by,
        "prompt_tokens": len(generation.prompt),
        "generated_tokens": len(generation.token_ids),
        "sampling": {
            "max_tokens": options.max_tokens,
            "stop": list(options.stop_texts),
            **sampling_facts(generation.sampling),
        },
        "speed": {
            "first_token_seconds": generation.first_token_seconds,
            "total_seconds": generation.seconds,
            "prefill_tokens_per_second": generation.prefill_tokens_per_second,
            "decode_tokens_per_second": generation.decode_tokens_per_second,
            "prefill_step": generation.prefill_step,
        },
        "cache": _cache_facts(generation),
        "memory": {
            "mlx_active_bytes": mx.get_active_memory(),
            "mlx_peak_bytes": mx.get_peak_memory(),
            "process_peak_bytes": peak_process_bytes(),
        },
        "device": str(mx.default_device()),
        "versions": versions(),
    }


def _logprob_facts(generation: Generation) -> list[dict[str, Any]] | None:
    """One entry a token: it, its log-probability, and the likeliest in its place."""
    if generation.logprobs is None:
        return None

    def facts(token: int, logprob: float) -> dict[str, Any]:
        text = spell(generation.tokenizer, [token])
        # JSON has no infinity; a token that a processor has ruled out has no log-probability.
        known = logprob if math.isfinite(logprob) else None
        return {"token_id": token, "text": text, "logprob": known}

    return [
        {**facts(found.token, found.logprob), "top": [facts(*each) for each in found.likeliest]}
        for found in generation.logprobs.found()
    ]


def _cache_facts(generation: Generation) -> dict[str, Any]:
    cache = generation.cache.sequence
    config = cache.config
    distinct = Counter(replace(layer, shared=False) for layer in cache.geometry.layers)
    return {
        "length": cache.length,
        "capacity": None if cache.capacity == MAX_CAPACITY else cache.capacity,
        "bytes_used": cache.nbytes_used,
        "bytes_held": cache.nbytes,
        "kv_dtype": config.kv_dtype,
        "initial_capacity": config.initial_capacity,
        "spare": config.spare,
        "rings": ring_facts(cache.layout),
        "geometry": {
            "summary": summary(cache.geometry),
            "windows": list(cache.geometry.windows),
            "layers": [{"count": count, **layer_facts(layer)} for layer, count in distinct.items()],
            "recurrent_layers": sum(layer.recurrent for layer in cache.geometry.model_layers),
        },
    }
