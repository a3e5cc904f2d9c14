"""Which requests run, and what each step feeds: integers only.

Decode first: every request that is producing tokens gets one in each step. What is left of the
step's tokens goes to prompts, one chunk for each request, in turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from mlx_kvcache.errors import CapacityError, ConfigError


class Chunk(NamedTuple):
    """The next `tokens` tokens of a request's prompt."""

    request: int
    tokens: int


@dataclass(frozen=True)
class StepPlan:
    """decodes: the requests that are fed one token each. chunks: the prompts that are read on."""

    decodes: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the step feeds."""
        return len(self.decodes) + sum(chunk.tokens for chunk in self.chunks)


class _Active:
    __slots__ = ("prefill", "reserved")

    def __init__(self, prefill: int, reserved: int) -> None:
        self.prefill = prefill
        self.reserved = reserved


class Scheduler:
    """Requests by number, first come first served.

    step_tokens: the most tokens of one step. max_active: how many requests run at once; each
    needs room for its one token in a step, so it is at most `step_tokens`.
    """

    def __init__(self, step_tokens: int, max_active: int) -> None:
        _check_positive("step_tokens", step_tokens)
        _check_positive("max_active", max_active)
        if max_active > step_tokens:
            raise ConfigError(
                f"{max_active} requests at once (max_active) need as many tokens in a step, but a "
                f"step has {step_tokens} (step_tokens); raise the one or lower the other"
            )
        self.step_tokens = step_tokens
        self.max_active = max_active
        self._waiting: deque[int] = deque()
        self._active: dict[int, _Active] = {}
        self._turns: deque[int] = deque()

    @property
    def waiting(self) -> tuple[int, ...]:
        """The requests that are yet to start, in their order."""
        return tuple(self._waiting)

    @property
    def active(self) -> tuple[int, ...]:
        """The requests that run, in the order in which they started."""
        return tuple(self._active)

    @property
    def head(self) -> int | None:
        """The request that starts next, None when none is waiting."""
        return self._waiting[0] if self._waiting else None

    @property
    def reserved(self) -> int:
        """Positions that the running requests may yet take."""
        return sum(entry.reserved for entry in self._active.values())

    def add(self, request: int) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request)

    def fits(self, need: int, free: int) -> bool:
        """Whether a request of `need` positions can start when `free` are not taken."""
        return len(self._active) < self.max_active and need <= free - self.reserved

    def start(self, request: int, prefill: int, need: int) -> None:
        """Start the first request of the queue: `prefill` tokens to read, `need` positions."""
        if self.head != request:
            raise ConfigError(f"request {request} is not the next; that is {self.head}")
        self._waiting.popleft()
        self._active[request] = _Active(prefill, need)
        if prefill:
            self._turns.append(request)

    def plan(self) -> StepPlan:
        """What the next step feeds. Changes nothing."""
        decodes = tuple(number for number, entry in self._active.items() if not entry.prefill)
        left = self.step_tokens - len(decodes)
        chunks = []
        for number in self._turns:
            if left <= 0:
                break
            tokens = min(left, self._active[number].prefill)
            chunks.append(Chunk(number, tokens))
            left -= tokens
        return StepPlan(decodes, tuple(chunks))

    def fed(self, request: int, tokens: int) -> None:
        """Record that `tokens` tokens of a running request were fed.

        A prompt that is not read to its end goes behind the others. Raises `CapacityError` for
        more tokens than the request has reserved.
        """
        entry = self._active[request]
        if tokens > entry.reserved:
            raise CapacityError(
                f"request {request} has {entry.reserved} positions left, and was fed {tokens}"
            )
        entry.reserved -= tokens
        if entry.prefill:
            entry.prefill -= tokens
            self._turns.remove(request)
            if entry.prefill:
                self._turns.append(request)

    def unread(self, request: int) -> int:
        """Prompt tokens of a running request that are yet to be read."""
        return self._active[request].prefill

    def remove(self, request: int) -> None:
        """Forget a request, whether it runs or waits."""
        if self._active.pop(request, None) is None:
            self._waiting.remove(request)
        elif request in self._turns:
            self._turns.remove(request)


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
