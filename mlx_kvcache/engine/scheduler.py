"""Which requests run, and what each step feeds: integers only.

Decode first: every request that is producing tokens gets one in each step. What is left of the
step's tokens goes to prompts, one chunk for each request, in turns.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import is_integer

#: A request, or whatever stands for one: its equality is its identity.
Key = TypeVar("Key")


class Scheduler(Generic[Key]):
    """Requests, first come first served.

    step_tokens: the most tokens of one step. max_active: how many requests run at once; each
    needs room for its one token in a step, so it is at most `step_tokens`.

    To be read, not written: `waiting`, the requests that are yet to start, in their order;
    `unread`, those that run, in the order in which they started, each with how many of its prompt
    tokens are yet to be read; `decodes`, those that have none left and are fed one token a step.

    A call that was interrupted may be made again.
    """

    def __init__(self, step_tokens: int, max_active: int) -> None:
        for name, value in (("step_tokens", step_tokens), ("max_active", max_active)):
            if not is_integer(value, 1):
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        if max_active > step_tokens:
            raise ConfigError(
                f"{max_active} requests at once (max_active) need as many tokens in a step, but a "
                f"step has {step_tokens} (step_tokens); raise the one or lower the other"
            )
        self.step_tokens = step_tokens
        self.max_active = max_active
        self.waiting: deque[Key] = deque()
        self.unread: dict[Key, int] = {}
        self.decodes: tuple[Key, ...] = ()
        self._turns: deque[Key] = deque()

    def add(self, request: Key) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def fits(self, need: int, free: int) -> bool:
        """Whether a request of `need` positions can start when `free` are free and unreserved."""
        return len(self.unread) < self.max_active and need <= free

    def start(self, request: Key, unread: int) -> None:
        """Start the first request of the queue, with `unread` prompt tokens to read."""
        if not self.waiting or self.waiting[0] != request:
            head = self.waiting[0] if self.waiting else None
            raise ConfigError(f"request {request} is not the next; that is {head}")
        self.left(request, unread)

    def chunks(self) -> list[tuple[Key, int]]:
        """The prompts that the next step reads on, and how many tokens of each."""
        left = self.step_tokens - len(self.decodes)
        chunks = []
        for request in self._turns:
            if left <= 0:
                break
            tokens = min(left, self.unread[request])
            chunks.append((request, tokens))
            left -= tokens
        return chunks

    def left(self, request: Key, unread: int) -> None:
        """Record how many prompt tokens of a running request are yet to be read.

        A prompt that is not read to its end goes behind the others.
        """
        self.unread[request] = unread
        self._drop(request)
        if unread:
            self._turns.append(request)
        self._sort()

    def remove(self, request: Key) -> None:
        """Forget a request, whether it runs or waits; nothing when it does neither."""
        self.unread.pop(request, None)
        self._drop(request)
        self._sort()

    def _drop(self, request: Key) -> None:
        for queue in (self.waiting, self._turns):
            if request in queue:
                queue.remove(request)

    def _sort(self) -> None:
        self.decodes = tuple(request for request, unread in self.unread.items() if not unread)
