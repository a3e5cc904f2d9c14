"""The figures of `batch`: what was answered, what the cache held, and how fast."""

from __future__ import annotations

from mlx_kvcache.commands.batch_run import Batch
from mlx_kvcache.commands.figures import rate_text, size_text


def report_lines(batch: Batch | None, refused: int, kept: int) -> list[str]:
    """Requests, cache and speed, one line each.

    refused: lines that cannot be answered. kept: those that an earlier run has answered.
    """
    beside = f", {refused} invalid" if refused else ""
    beside += f", {kept} kept from before" if kept else ""
    if batch is None:
        return [f"batch   nothing left to answer{beside}"]
    metrics, engine = batch.engine.metrics, batch.engine
    # What a stop text ended, the engine was told to cancel.
    own = 1 if batch.prefix is not None else 0
    mean = metrics.mean_rows
    queue = metrics.mean_queue_seconds
    requests = (
        f"batch   {metrics.finished + metrics.cancelled - own} finished, {metrics.failed} failed, "
        f"{len(engine.active) + len(engine.waiting)} unfinished{beside}"
    )
    if queue is not None:
        requests += (
            f"; queue {queue:.2f} s on average, {metrics.longest_queue_seconds:.2f} s at most"
        )
    occupancy = "-" if mean is None else f"{mean:.1f} of {engine.max_active} sessions decoding"
    cells = (
        f"cache   {engine.cache_kind}, {metrics.peak_used} of {engine.cache.capacity} positions at "
        f"most, {metrics.peak_shared} of them saved by sharing, {size_text(metrics.peak_bytes)} "
        f"held; {occupancy}"
    )
    speed = (
        f"speed   prefill {metrics.prompt_tokens} tokens at {rate_text(metrics.prefill_rate)}; "
        f"decode {metrics.tokens} tokens at {rate_text(metrics.decode_rate)}"
    )
    return [requests, cells, speed]
