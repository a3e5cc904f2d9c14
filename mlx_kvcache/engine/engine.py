"""The engine: sessions and requests over one model and one cache of many sequences."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.control.factory import CELL
from mlx_kvcache.engine.choosing import choose
from mlx_kvcache.engine.metrics import Metrics
from mlx_kvcache.engine.passes import Passes, Row
from mlx_kvcache.engine.requests import (
    CANCELLED,
    FAILED,
    LENGTH,
    STOP,
    Event,
    Request,
    Session,
    check_max_tokens,
    check_prompt,
    check_stop,
)
from mlx_kvcache.engine.scheduler import Chunk, Scheduler
from mlx_kvcache.engine.sessions import SessionStore, make_cache
from mlx_kvcache.errors import CapacityError, ConfigError, KVCacheError, SessionError
from mlx_kvcache.facts.config import (
    DEFAULT_INITIAL_CAPACITY,
    DEFAULT_SPARE,
    CacheConfig,
)
from mlx_kvcache.integrations.attention import FlatModel
from mlx_kvcache.integrations.mlx_lm import default_prefill_step
from mlx_kvcache.integrations.sampling import (
    RandomState,
    Sampler,
    Sampling,
    check_sampling,
    sampler_of,
)

GREEDY = Sampling()
#: Rows that a batched session starts with, unless they are given.
BATCHED_ROWS = 64


class Engine(SessionStore):
    """Runs many conversations with one model at once: continuous batching without padding.

    capacity: the most positions that all sessions hold together. kind: "cell" (forks share rows)
    or "batched" (each session has pools and rings of its own). max_active: the most requests
    that run at once. step_tokens: the most tokens of one step (None: the device's usual prompt
    chunk). max_context: the most positions of one session. The others are the fields of
    `CacheConfig`, and the windows of `make_prompt_cache`.

    A step feeds every running request one token, and reads prompts with what is left of
    `step_tokens`. A request starts when its prompt and all of `max_tokens` fit into what is not
    taken or reserved; until then it waits, first come first served.

    Not for several threads at once, but for `Request.cancel`. Raises `UnsupportedModelError`,
    `GeometryError` or `ConfigError`.
    """

    def __init__(
        self,
        model: Module,
        capacity: int,
        kind: str = CELL,
        *,
        max_active: int = 32,
        step_tokens: int | None = None,
        max_context: int | None = None,
        kv_dtype: str | None = None,
        initial_capacity: int | None = None,
        spare: int = DEFAULT_SPARE,
        windows: Sequence[int] | None = None,
        max_write: int | None = None,
    ) -> None:
        if step_tokens is None:
            step_tokens = max(default_prefill_step(), max_active)
        self._scheduler = Scheduler(step_tokens, max_active)
        self._model = FlatModel(model, windows)
        if initial_capacity is None:
            # Every batched session starts with so many rows of its own.
            initial_capacity = DEFAULT_INITIAL_CAPACITY if kind == CELL else BATCHED_ROWS
        config = CacheConfig(
            capacity, kv_dtype, initial_capacity, spare, max_context, max_write=max_write
        )
        self.cache = make_cache(self._model, config, kind)
        self._passes = Passes(self._model, self.cache)
        self._max_context = min(max_context or capacity, capacity)
        self._requests: dict[int, Request] = {}
        self._next_number = 0
        self._events: list[Event] = []
        self._to_cancel: deque[Request] = deque()
        self.metrics = Metrics()

    @property
    def vocabulary(self) -> int:
        """The number of token ids of the model."""
        return self._model.vocabulary

    @property
    def max_active(self) -> int:
        """The most requests that run at once."""
        return self._scheduler.max_active

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self._requests

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that wait for room, in their order."""
        return tuple(self._requests[number] for number in self._scheduler.waiting)

    @property
    def active(self) -> tuple[Request, ...]:
        """The requests that run, in the order in which they started."""
        return tuple(self._requests[number] for number in self._scheduler.active)

    def close(self, session: Session) -> None:
        """Forget a session, and cancel its request. Closing it again does nothing."""
        if session.sequence is None:
            return
        self._sequence(session)
        if session.request is not None:
            self._end(session.request, CANCELLED)
        self._forget(session)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
        session: Session | None = None,
        parent: Session | None = None,
        sampler: Sampler | None = None,
    ) -> Request:
        """Ask for an answer to `prompt`, token ids; it is produced by `step`.

        With a `session` the prompt continues it, without one it has a session of its own, which
        ends with the answer. That begins as a fork of `parent`, made when the request starts,
        which is not before a request that runs on the parent has ended.
        max_tokens 0 reads the prompt and answers nothing. A seed gives the request a random
        state of its own, so that its answer does not depend on who else is there. `sampler`
        takes the place of mlx-lm's own for `sampling`.

        Raises `ConfigError` (bad values), `SessionError` (closed, or has an unfinished request),
        or `CapacityError` for what can never fit; nothing has changed then.
        """
        try:
            request = self._checked(prompt, max_tokens, sampling, stop, session, parent, sampler)
        except KVCacheError:
            self.metrics.refused += 1
            raise
        self._next_number += 1
        self._requests[request.number] = request
        self._scheduler.add(request.number)
        if session is not None:
            session.request = request
        self.metrics.submitted += 1
        return request

    def step(self) -> list[Event]:
        """Run one step, and answer what it did for whom; nothing when the engine is idle.

        Raises `CapacityError`, and changes nothing, when nothing runs and the first waiting
        request does not fit beside the idle sessions. A request that fails is ended, and its
        session closed, with its `error` set.
        """
        self._mend()
        while self._to_cancel:
            request = self._to_cancel.popleft()
            if request.finish_reason is None:
                self._end(request, CANCELLED)
        self._admit()
        plan = self._scheduler.plan()
        if plan.decodes:
            self._decode([self._requests[number] for number in plan.decodes])
        if plan.chunks:
            self._prefill(plan.chunks)
        if plan.tokens:
            self._observe()
        elif not self._events and self._requests:
            self._refuse_to_wait()
        events, self._events = self._events, []
        return events

    def cancel(self, request: Request) -> None:
        """End a request at the next step; may be called from any thread, and more than once."""
        self._to_cancel.append(request)

    def run(self) -> Iterator[Event]:
        """Run steps until no request is left, and answer their events. Raises as `step`."""
        while self._requests or self._events:
            yield from self.step()

    def compact(self) -> None:
        """Move the rows of cells together and give spare memory back. Copies what is held."""
        if isinstance(self.cache, MLXCellCache):
            self.cache.defragment()
        mx.clear_cache()

    def _checked(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[int],
        session: Session | None,
        parent: Session | None,
        sampler: Sampler | None,
    ) -> Request:
        tokens = check_prompt(prompt, self.vocabulary)
        check_max_tokens(max_tokens)
        check_sampling(sampling)
        stop_ids = check_stop(stop)
        if session is not None and parent is not None:
            raise ConfigError("a request continues a session or forks a parent, not both")
        held = session or parent
        if held is not None:
            self._sequence(held)
        if session is not None and session.request is not None:
            raise SessionError(
                f"the session has an unfinished request ({session.request.number}); wait for it "
                "or cancel it, or fork the session"
            )
        before = held.tokens if held is not None else []
        pending = len(before) - (held.position if held is not None else 0)
        if not tokens and not (pending and max_tokens):
            raise ConfigError("the prompt is empty; give at least one token")
        self._check_can_fit(len(before) + len(tokens), max_tokens)
        random = RandomState.of(sampling.seed) if sampling.temp else None
        return Request(
            self, self._next_number, tokens, max_tokens, stop_ids, sampling,
            sampler or sampler_of(sampling), random, session, parent, session is None,
        )  # fmt: skip

    def _check_can_fit(self, known: int, max_tokens: int) -> None:
        if known + max_tokens > self._max_context:
            raise CapacityError(
                f"{known} tokens and {max_tokens} new ones need {known + max_tokens} positions, "
                f"but a session has at most {self._max_context}; ask for fewer, or make the engine "
                "with a larger capacity"
            )

    def _mend(self) -> None:
        """Make good for a step that was interrupted between its pass and its bookkeeping."""
        for number in self._scheduler.active:
            request = self._requests[number]
            session = _session(request)
            ahead = session.position - len(session.tokens) + (1 if request.max_tokens else 0)
            ahead += self._scheduler.unread(number)
            if ahead and self._scheduler.unread(number):
                self._scheduler.fed(number, ahead)
            elif ahead:
                # The token that followed is not known any more.
                self.cache.rewind(self._sequence(session), session.position - ahead)
            self._end_if_read(request)

    def _admit(self) -> None:
        while (number := self._scheduler.head) is not None:
            request = self._requests[number]
            if request.parent is not None and _is_running(request.parent):
                return
            try:
                need, copied = self._need(request)
                if not self._scheduler.fits(need + copied, self.cache.free):
                    return
                self._start(request, need)
            except KVCacheError as error:
                # Its parent is gone, or has grown since.
                self._fail(request, error)

    def _need(self, request: Request) -> tuple[int, int]:
        """Positions that a request will take, and those that its fork copies."""
        held = request.session or request.parent
        known, position = (len(held.tokens), self.position(held)) if held else (0, 0)
        self._check_can_fit(known + len(request.prompt), request.max_tokens)
        copies = request.parent is not None and not isinstance(self.cache, MLXCellCache)
        need = known - position + len(request.prompt) + request.max_tokens
        return need, position if copies else 0

    def _start(self, request: Request, need: int) -> None:
        session = request.session
        if session is None:
            session = self.open() if request.parent is None else self.fork(request.parent)
            session.request = request
            request.session = session
        session.tokens.extend(request.prompt)
        unread = len(session.tokens) - session.position
        # The last prompt token is fed by a decode pass, the first that asks for logits.
        prefill = unread - 1 if request.max_tokens else unread
        self._scheduler.start(request.number, prefill, need)
        request.started = time.perf_counter()
        self.metrics.queued(request.started - request.submitted)

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        began = time.perf_counter()
        requests = [self._requests[chunk.request] for chunk in chunks]
        rows = [
            self._row(request, chunk.tokens)
            for request, chunk in zip(requests, chunks, strict=True)
        ]
        for request, row, result in zip(
            requests, rows, self._passes.run(rows, with_logits=False), strict=True
        ):
            if result.error is not None:
                self._fail(request, result.error)
                continue
            self._scheduler.fed(request.number, len(row.tokens))
            self.metrics.prompt_tokens += len(row.tokens)
            self._end_if_read(request)
        self.metrics.prefill_passes += 1
        self.metrics.prefill_seconds += time.perf_counter() - began

    def _end_if_read(self, request: Request) -> None:
        if not request.max_tokens and not self._scheduler.unread(request.number):
            self._end(request, LENGTH)

    def _decode(self, requests: Sequence[Request]) -> None:
        began = time.perf_counter()
        rows = [self._row(request, 1) for request in requests]
        results = self._passes.run(rows, with_logits=True)
        for request, result in zip(requests, results, strict=True):
            if result.error is not None:
                self._fail(request, result.error)
                continue
            try:
                token = choose(request, result, self.vocabulary)
            except Exception as error:
                self._fail(request, error)
                continue
            self._scheduler.fed(request.number, 1)
            self._accept(request, token)
        self.metrics.decode_passes += 1
        self.metrics.decode_rows += len(requests)
        self.metrics.decode_seconds += time.perf_counter() - began

    def _row(self, request: Request, tokens: int) -> Row:
        session = _session(request)
        position = session.position
        sequence = self._sequence(session)
        return Row(sequence, session.tokens[position : position + tokens])

    def _accept(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        _session(request).tokens.append(token)
        self.metrics.tokens += 1
        if request.first_token is None:
            request.first_token = time.perf_counter()
        if token in request.stop:
            self._end(request, STOP, token)
        elif len(request.tokens) == request.max_tokens:
            self._end(request, LENGTH, token)
        else:
            self._events.append(Event(request, token, None))

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        self._end(request, FAILED)
        if request.session is not None:
            self._forget(request.session)

    def _end(self, request: Request, reason: str, token: int | None = None) -> None:
        request.finish_reason = reason
        request.ended = time.perf_counter()
        self._scheduler.remove(request.number)
        del self._requests[request.number]
        self._events.append(Event(request, token, reason))
        if reason == CANCELLED:
            self.metrics.cancelled += 1
        elif reason == FAILED:
            self.metrics.failed += 1
        else:
            self.metrics.finished += 1
        session = request.session
        if session is not None:
            session.request = None
            if request.owns_session:
                self._forget(session)

    def _observe(self) -> None:
        cache = self.cache
        self.metrics.observe(len(self._scheduler.active), cache.used, self.shared, cache.nbytes)

    def _refuse_to_wait(self) -> None:
        number = self._scheduler.head
        assert number is not None, "a request that does not run waits"
        need = sum(self._need(self._requests[number]))
        raise CapacityError(
            f"request {number} needs {need} positions and {self.free} of {self.cache.capacity} are "
            "free, with no other request running: idle sessions hold the rest; close some, or "
            "cancel the request"
        )


def _session(request: Request) -> Session:
    assert request.session is not None, "a request that runs has a session"
    return request.session


def _is_running(session: Session) -> bool:
    return session.request is not None and session.request.started is not None
