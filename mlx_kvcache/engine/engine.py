"""The engine: sessions and requests over one model and one cache of many sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_kvcache.control.factory import BATCHED, CELL
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.engine.admission import Admission
from mlx_kvcache.engine.exclusive import exclusive
from mlx_kvcache.engine.metrics import Metrics
from mlx_kvcache.engine.passes import Passes
from mlx_kvcache.engine.requests import (
    CANCELLED,
    FAILED,
    LENGTH,
    Event,
    Outcome,
    Request,
    Session,
    check_choice,
    check_max_tokens,
    check_prompt,
    check_stop,
    ended,
)
from mlx_kvcache.engine.scheduler import Scheduler
from mlx_kvcache.engine.sessions import Sessions, shared_cache
from mlx_kvcache.errors import KVCacheError, SessionError
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY, DEFAULT_SPARE, CacheConfig
from mlx_kvcache.integrations.attention import FlatModel
from mlx_kvcache.integrations.mlx_lm import default_prefill_step
from mlx_kvcache.integrations.sampling import (
    Chooser,
    RandomState,
    Sampler,
    Sampling,
    check_sampling,
)
from mlx_kvcache.integrations.tracing import weight_bytes

GREEDY = Sampling()
#: Rows that a batched session starts with, unless they are given.
BATCHED_ROWS = 64


class Engine:
    """Runs many conversations with one model at once: continuous batching without padding.

    capacity: the most positions that all sessions hold together. kind: "cell" (forks share rows),
    "batched" (each session has pools and rings of its own), or that of a builder in the factory
    whose caches hold many sequences. max_active: the most requests that run at once.
    step_tokens: the most tokens of one step (None: the device's usual prompt chunk). max_context:
    the most positions of one session. The others are the fields of `CacheConfig`, and the
    windows of `make_prompt_cache`.

    A step feeds every running request one token, and reads prompts with what is left of
    `step_tokens`. A request starts when its prompt and all of `max_tokens` fit into what is not
    taken or reserved; until then it waits, first come first served.

    What is called from within a call of the same engine (by a sampler, a signal handler, a
    finalizer) is refused with `SessionError`, but for `cancel` and what only looks.

    The cache has a key in the registry until `shutdown`, which a with-body calls at its end. Not
    for several threads at once, but for `Request.cancel`. Raises `UnsupportedModelError`,
    `GeometryError`, `ConfigError`, or for a kind that will not do `CacheKindError` or `FaceError`.
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
        self._scheduler: Scheduler[Request] = Scheduler(step_tokens, max_active)
        if initial_capacity is None:
            # Every batched session starts with so many rows of its own.
            initial_capacity = BATCHED_ROWS if kind == BATCHED else DEFAULT_INITIAL_CAPACITY
        config = CacheConfig(
            capacity,
            kv_dtype,
            initial_capacity,
            spare,
            max_context,
            max_write=max_write,
            weight_bytes=weight_bytes(model),
        )
        flat_model = FlatModel(model, windows)
        self.vocabulary = flat_model.vocabulary
        self.cache_kind = kind
        self.max_active = max_active
        self._owner = CacheSession(flat_model.geometry, config, kind=kind).open()
        self.cache = shared_cache(self._owner)
        self._sessions = Sessions(self.cache)
        self._admission = Admission(
            self._scheduler, self._sessions, min(max_context or capacity, capacity)
        )
        self._passes = Passes(flat_model, self._sessions)
        self._numbers = 0
        self._events: list[Event] = []
        self._to_cancel: deque[Request] = deque()
        self._metrics = Metrics()
        self._decided: Sequence[Outcome] = ()
        self._is_whole = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits, nor is its end yet to be told."""
        return not (self._scheduler.unread or self._scheduler.waiting or self._decided)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that wait for room, in their order."""
        return tuple(self._scheduler.waiting)

    @property
    def active(self) -> tuple[Request, ...]:
        """The requests that run, in the order in which they started."""
        return tuple(self._scheduler.unread)

    @property
    def free(self) -> int:
        """Positions that are neither taken nor reserved by a running request."""
        return self._admission.free

    @property
    def metrics(self) -> Metrics:
        """What the engine has done so far."""
        self._observe()
        return self._metrics

    @exclusive
    def open(self) -> Session:
        """Begin an empty session, to be continued by `submit` and ended by `close`."""
        self._begin()
        session = self._sessions.new(self)
        self._is_whole = True
        return session

    @exclusive
    def fork(self, session: Session, up_to: int | None = None) -> Session:
        """Begin a session with the same tokens, up to a position; cells are shared, not copied.

        Raises `SessionError` (closed), `RewindError` (`up_to` beyond what is held or overwritten
        by a ring), or `CapacityError`: a batched fork takes as many positions as it has, and
        what running requests have reserved is not free.
        """
        self._admission.check_fork(session, up_to)
        self._begin()
        twin = self._sessions.fork(session, up_to)
        self._is_whole = True
        return twin

    def position(self, session: Session) -> int:
        """Tokens of a session that the cache holds. Raises `SessionError` when it is closed."""
        return self._sessions.position(session)

    def close(self, session: Session) -> None:
        """Forget a session, and cancel its request. Closing it again does nothing."""
        if not isinstance(session, Session) or session.sequence is not None:
            self._close(session)

    @exclusive
    def shutdown(self) -> None:
        """Cancel every request, close every session, and give back the cache's key.

        May be repeated. There are no new sessions and requests after it.
        """
        if not self._is_whole or self._sessions.have_lost:
            self._mend()
        self._is_whole = False
        self._settle([ended(request, CANCELLED) for request in (*self.active, *self.waiting)])
        self._sessions.forget_all()
        self._owner.close()
        self._compact()

    @exclusive
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
            tokens = check_prompt(prompt, self.vocabulary)
            check_max_tokens(max_tokens)
            check_choice(sampling, sampler)
            check_sampling(sampling)
            stop_ids = check_stop(stop)
            self._admission.check_request(len(tokens), max_tokens, session, parent)
        except KVCacheError:
            self._metrics.refused += 1
            raise
        self._begin()
        random = RandomState.of(sampling.seed) if sampling.temp else None
        request = Request(
            self, self._numbers, tokens, max_tokens, stop_ids, sampling,
            Chooser(sampling, sampler), random, session, parent, session is None,
        )  # fmt: skip
        self._numbers += 1
        self._metrics.submitted += 1
        self._scheduler.add(request)
        if session is not None:
            session.request = request
        self._is_whole = True
        return request

    @exclusive
    def step(self) -> list[Event]:
        """Run one step, and answer what was done for whom; nothing when the engine is idle.

        Raises `CapacityError`, or `MemoryLimitError`, and changes nothing, when nothing runs and
        the first waiting request does not fit beside the idle sessions. A request that fails is
        ended, and its session closed, with its `error` set.
        """
        if not self._advance() and not self._events:
            self._admission.refuse_to_wait()
        events, self._events = self._events, []
        return events

    def run(self) -> Iterator[Event]:
        """Run steps until no request is left, and answer their events. Raises as `step`.

        What it was not asked for any more, the next `run` or `step` answers.
        """
        while self._events or not self.is_idle:
            if not self._events:
                self._go_on()
            while self._events:
                yield self._events.pop(0)

    @exclusive
    def follow(self, request: Request) -> None:
        """Run a step unless a request has ended; its events are told, those of others kept."""
        self._check_own(request)
        if request.finish_reason is None and not self._advance():
            self._admission.refuse_to_wait()
        self._events = [event for event in self._events if event.request is not request]

    def cancel(self, request: Request) -> None:
        """End a request at the next step; may be called from any thread, and more than once.

        Raises `SessionError` for a request of another engine.
        """
        self._check_own(request)
        self._to_cancel.append(request)

    @exclusive
    def compact(self) -> None:
        """Move the rows of cells together and give spare memory back. Copies what is held."""
        self._compact()

    @exclusive
    def _close(self, session: Session) -> None:
        self._sessions.sequence(session)
        self._begin()
        if session.request is not None:
            self._settle([ended(session.request, CANCELLED)])
        self._sessions.forget(session)
        self._is_whole = True

    @exclusive
    def _go_on(self) -> None:
        if not self._advance():
            self._admission.refuse_to_wait()

    def _compact(self) -> None:
        if not self._is_whole or self._sessions.have_lost:
            self._mend()
        self._observe()
        self._sessions.defragment()
        mx.clear_cache()

    def _check_own(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise SessionError(f"a request is what submit answers, got {type(request).__name__}")
        if request.host is not self:
            raise SessionError("the request belongs to another engine")

    def _begin(self) -> None:
        """Prepare a verb; one that is interrupted is mended by the next."""
        if not self._owner.is_open:
            raise SessionError("the engine has been shut down; make another")
        if not self._is_whole or self._sessions.have_lost:
            self._mend()
        self._is_whole = False

    def _advance(self) -> bool:
        """Run one step, and keep its events; answers whether anything was done."""
        before = len(self._events)
        if not self._is_whole or (self._scheduler.waiting and self._sessions.have_lost):
            self._mend()
        self._is_whole = False
        while self._to_cancel:
            if self._to_cancel[0].finish_reason is None:
                self._settle([ended(self._to_cancel[0], CANCELLED)])
            self._to_cancel.popleft()
        scheduler = self._scheduler
        if scheduler.waiting:
            self._admit()
        decodes = scheduler.decodes
        chunks = scheduler.chunks() if len(decodes) < len(scheduler.unread) else []
        if decodes:
            began = perf_counter()
            self._settle(self._passes.decode(decodes))
            self._metrics.decode_passes += 1
            self._metrics.decode_rows += len(decodes)
            self._metrics.decode_seconds += perf_counter() - began
        if chunks:
            self._prefill(chunks)
        self._is_whole = True
        return bool(decodes or chunks) or len(self._events) > before

    def _mend(self) -> None:
        """Put right what an interrupted verb has left: what was decided is carried out."""
        self._settle(self._decided)
        self._sessions.sweep()
        for request in self.waiting:
            if request.session is not None:
                request.session.request = request
        read = []
        for request in self.active:
            assert request.session is not None, "a request that runs has a session"
            history = request.session.history
            if request.max_tokens:
                # Of a token that was fed and has no successor, the successor is not known.
                unread = len(history.continue_as(history.tokens)) - 1
            else:
                history.settle()
                unread = len(history.pending)
            self._scheduler.left(request, unread)
            if not unread and not request.max_tokens:
                read.append(ended(request, LENGTH))
        self._settle(read)
        self._is_whole = True

    def _admit(self) -> None:
        while self._scheduler.waiting:
            request = self._scheduler.waiting[0]
            try:
                if not self._admission.start(request):
                    return
            except KVCacheError as error:
                self._settle([ended(request, FAILED, error)])
            else:
                self._metrics.queued(request.queue_seconds or 0.0)
                self._observe()

    def _prefill(self, chunks: Sequence[tuple[Request, int]]) -> None:
        began = perf_counter()
        outcomes = []
        errors = self._passes.read(chunks)
        for (request, tokens), error in zip(chunks, errors, strict=True):
            if error is not None:
                outcomes.append(ended(request, FAILED, error))
                continue
            unread = self._scheduler.unread[request] - tokens
            self._scheduler.left(request, unread)
            self._metrics.prompt_tokens += tokens
            if not unread and not request.max_tokens:
                outcomes.append(ended(request, LENGTH))
        self._observe()
        self._settle(outcomes)
        self._metrics.prefill_passes += 1
        self._metrics.prefill_seconds += perf_counter() - began

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        """Carry out what was decided; when this is interrupted, `_mend` does it again."""
        self._decided = outcomes
        events = []
        for event, total, error, random in outcomes:
            request, token, reason = event
            if token is not None:
                assert request.session is not None, "a request that runs has a session"
                tokens = request.session.history.tokens
                is_new, end = len(request.tokens) < total, request.begin + total
                # One statement.
                tokens[end - 1 :], request.tokens[total - 1 :] = (token,), (token,)
                self._metrics.tokens += is_new
                request.random = random
                if request.first_token is None:
                    request.first_token = perf_counter()
            if reason is not None:
                self._end(request, reason, error)
            events.append(event)
        self._events, self._decided = [*self._events, *events], ()

    def _end(self, request: Request, reason: str, error: Exception | None) -> None:
        self._observe()
        session = request.session
        if session is not None:
            if session.request is request:
                session.request = None
            if request.owns_session or reason == FAILED:
                self._sessions.forget(session)
        self._scheduler.remove(request)
        if request.finish_reason is None:
            request.error, request.ended = error, perf_counter()
            request.finish_reason = reason
            self._metrics.end(reason)

    def _observe(self) -> None:
        """Note how full the engine is; between the calls of this, nothing but decoding grows."""
        active, cache = len(self._scheduler.unread), self.cache
        self._metrics.observe(active, cache.used, self._sessions.shared, cache.nbytes)
