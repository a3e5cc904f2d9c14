"""Sessions, requests, and what happens to them: records, whose verbs ask a host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mlx_kvcache.control.history import TokenHistory
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import MAX_CAPACITY
from mlx_kvcache.integrations.sampling import Chooser, RandomState, Sampling

STOP = "stop"
LENGTH = "length"
CANCELLED = "cancelled"
FAILED = "failed"


class Host(Protocol):
    """Who runs the requests: what sessions and requests ask of an engine."""

    def submit(self, *arguments: Any, **choices: Any) -> Request: ...
    def fork(self, session: Session, up_to: int | None = None) -> Session: ...
    def close(self, session: Session) -> None: ...
    def position(self, session: Session) -> int: ...
    def cancel(self, request: Request) -> None: ...
    def follow(self, request: Request) -> None: ...


class Event(NamedTuple):
    """What a step did for a request: the token it produced, and how it ended, if it did.

    finish_reason: "stop" (a stop id, which is `token`), "length", "cancelled" or "failed"; a
    request of `max_tokens` 0 ends with "length" once its prompt is read.
    """

    request: Request
    token: int | None
    finish_reason: str | None


@dataclass(eq=False)
class Session:
    """A conversation: the tokens so far. The engine makes them.

    sequence: the id in the cache, None once it is closed. request: the one that is unfinished.
    """

    host: Host
    sequence: int | None
    history: TokenHistory
    request: Request | None = None

    @property
    def tokens(self) -> list[int]:
        """Everything that was given and produced.

        The newest ones may not have been fed yet: that of an answer's end is fed before the next
        prompt.
        """
        return self.history.tokens

    @property
    def position(self) -> int:
        """Tokens that the cache holds. Raises `SessionError` for a closed session."""
        return self.host.position(self)

    def submit(self, prompt: Sequence[int], **choices: Any) -> Request:
        """Continue this conversation; see `Engine.submit`."""
        return self.host.submit(prompt, session=self, **choices)

    def fork(self, up_to: int | None = None) -> Session:
        """Another conversation with the same beginning; see `Engine.fork`."""
        return self.host.fork(self, up_to)

    def close(self) -> None:
        """Forget the conversation; see `Engine.close`."""
        self.host.close(self)


@dataclass(eq=False)
class Request:
    """One answer, as far as it is.

    owns_session: whether its session ends with it. begin: where in the session's tokens the
    answer begins, 0 before the prompt is among them. tokens: those produced, a stop id
    included. finish_reason: see `Event`; None until it ends. error: what failed it. Times are of
    `time.perf_counter`.
    """

    host: Host
    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    sampling: Sampling
    chooser: Chooser
    random: RandomState | None
    session: Session | None
    parent: Session | None
    owns_session: bool
    begin: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """Time from submission to start."""
        return None if self.started is None else self.started - self.submitted

    def cancel(self) -> None:
        """End the request at the next step; what it has produced stands. For any thread."""
        self.host.cancel(self)

    def stream(self) -> Iterator[int]:
        """The tokens as they are produced; runs the engine, and so all other requests too.

        The events of the others are kept for `Engine.run` and `Engine.step`. Raises what failed
        the request, and `CapacityError` as `Engine.step` does.
        """
        shown = 0
        is_over = False
        while not is_over:
            is_over = self.finish_reason is not None
            while shown < len(self.tokens):
                yield self.tokens[shown]
                shown += 1
            self.host.follow(self)
        if self.error is not None:
            raise self.error


class Outcome(NamedTuple):
    """What was decided for a request. total: its tokens then, so that none is added twice."""

    event: Event
    total: int
    error: Exception | None = None
    random: RandomState | None = None


def ended(request: Request, reason: str, error: Exception | None = None) -> Outcome:
    """That a request ends without another token."""
    return Outcome(Event(request, None, reason), len(request.tokens), error)


def check_prompt(prompt: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The token ids of a prompt. Raises `ConfigError`."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise ConfigError(f"a prompt is a sequence of token ids, got {shortened(prompt)}")
    tokens = tuple(prompt)
    for index, token in enumerate(tokens):
        if not is_integer(token, 0, vocabulary - 1):
            raise ConfigError(
                f"token {index} of the prompt is {shortened(token)}; the model's token ids are "
                f"integers from 0 to {vocabulary - 1}"
            )
    return tokens


def check_max_tokens(max_tokens: object) -> None:
    """Raise `ConfigError` unless this is a number of tokens."""
    if not is_integer(max_tokens, 0, MAX_CAPACITY):
        raise ConfigError(f"max_tokens must be an integer >= 0, got {shortened(max_tokens)}")


def check_stop(stop: Sequence[int]) -> frozenset[int]:
    """The stop ids as a set. Raises `ConfigError`."""
    if not isinstance(stop, list | tuple | Set):
        raise ConfigError(f"stop ids are given in a list or a set, got {shortened(stop)}")
    for token in stop:
        if not is_integer(token):
            raise ConfigError(f"stop ids must be integers, got {shortened(token)}")
    return frozenset(stop)


def check_choice(sampling: object, sampler: object) -> None:
    """Raise `ConfigError` unless these can choose tokens."""
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling must be a Sampling, got {shortened(sampling)}")
    if sampler is not None and not callable(sampler):
        raise ConfigError(
            "a sampler is a function from log-probabilities [1, vocabulary] to a token [1], got "
            f"{shortened(sampler)}"
        )
