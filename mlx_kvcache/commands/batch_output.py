"""The results of `batch`: JSON lines in input order and the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_kvcache.commands.figures import rate_text, size_text
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.files import replacing

if TYPE_CHECKING:
    from mlx_kvcache.commands.batch_run import Batch


def check_output(path: Path | None, overwrite: bool) -> None:
    """Raise `ConfigError`, before anything is computed, if results could not be written there."""
    if path is None:
        return
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"there is no directory {path.resolve().parent} to write --output to")
    if path.is_dir():
        raise ConfigError(f"--output {path} is a directory; give a file")
    if path.exists() and not overwrite:
        raise ConfigError(f"--output {path} exists; give another name, or --overwrite")


class InOrder:
    """Writes results to standard output as soon as all those before them are written."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._next = 0

    def advance(self) -> None:
        """Write what can be written in order."""
        requests = self._batch.requests
        while self._next < len(requests) and requests[self._next].finish_reason is not None:
            self._write(self._next)
            self._next += 1
        sys.stdout.flush()

    def finish(self) -> None:
        """Write the other finished results too, those of an interrupted run."""
        for index in range(self._next, len(self._batch.requests)):
            if self._batch.requests[index].finish_reason is not None:
                self._write(index)
        self._next = len(self._batch.requests)
        sys.stdout.flush()

    def _write(self, index: int) -> None:
        sys.stdout.write(_line(self._batch.facts(index)))


def write_file(batch: Batch, path: Path) -> None:
    """The finished results, in input order, written at once or not at all. Raises `OSError`."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for index, request in enumerate(batch.requests):
            if request.finish_reason is not None:
                file.write(_line(batch.facts(index)))


def report_lines(batch: Batch) -> list[str]:
    """Requests, cache and speed, one line each."""
    metrics, engine = batch.engine.metrics, batch.engine
    own = 1 if batch.prefix is not None else 0
    mean = metrics.mean_rows
    queue = metrics.mean_queue_seconds
    requests = (
        f"batch   {metrics.finished - own} finished, {metrics.failed} failed, "
        f"{metrics.cancelled} cancelled, {len(engine.active) + len(engine.waiting)} unfinished"
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


def _line(facts: dict[str, Any]) -> str:
    return json.dumps(facts) + "\n"
