"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_kvcache.engine.requests import CANCELLED, FAILED


@dataclass
class Metrics:
    """Totals since the engine was made.

    prompt_tokens: read into the cache. tokens: produced. decode_rows: rows of all decode passes,
    so that decode_rows / decode_passes is the mean number of requests that decoded at once.
    peak_used: the most positions held. peak_shared: the most positions that sequences held
    without a cell of their own. Seconds are wall-clock time.
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    prefill_passes: int = 0
    decode_passes: int = 0
    decode_rows: int = 0
    peak_active: int = 0
    peak_used: int = 0
    peak_shared: int = 0
    peak_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    started: int = 0
    queue_seconds: float = 0.0
    longest_queue_seconds: float = 0.0

    @property
    def mean_rows(self) -> float | None:
        """Requests that decoded at once, on average; None before the first decode pass."""
        return self.decode_rows / self.decode_passes if self.decode_passes else None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second of prefill."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_rate(self) -> float | None:
        """Produced tokens a second of decode, over all requests."""
        return self.tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def mean_queue_seconds(self) -> float | None:
        """Time from submission to start, on average over the requests that started."""
        return self.queue_seconds / self.started if self.started else None

    def queued(self, seconds: float) -> None:
        """Record that a request started after `seconds` in the queue."""
        self.started += 1
        self.queue_seconds += seconds
        self.longest_queue_seconds = max(self.longest_queue_seconds, seconds)

    def end(self, reason: str) -> None:
        """Record that a request ended."""
        if reason == CANCELLED:
            self.cancelled += 1
        elif reason == FAILED:
            self.failed += 1
        else:
            self.finished += 1

    def observe(self, active: int, used: int, shared: int, held_bytes: int) -> None:
        """Record how full the engine is."""
        self.peak_active = max(self.peak_active, active)
        self.peak_used = max(self.peak_used, used)
        self.peak_shared = max(self.peak_shared, shared)
        self.peak_bytes = max(self.peak_bytes, held_bytes)
