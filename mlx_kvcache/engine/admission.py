"""Room: what a request needs, what is free for it, and its start."""

from __future__ import annotations

from time import perf_counter

from mlx_kvcache.engine.requests import Request, Session
from mlx_kvcache.engine.scheduler import Scheduler
from mlx_kvcache.engine.sessions import Sessions
from mlx_kvcache.errors import CapacityError, ConfigError, MemoryLimitError, SessionError


class Admission:
    """Starts requests whose prompt and whole answer fit, so that none ever runs out of room.

    max_context: the most positions of one session.
    """

    def __init__(self, scheduler: Scheduler[Request], sessions: Sessions, max_context: int) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._max_context = max_context

    @property
    def free(self) -> int:
        """Positions that are neither taken nor reserved by a running request."""
        free = self._sessions.cache.free
        for request in self._scheduler.unread:
            assert request.session is not None, "a request that runs has a session"
            end = request.begin + request.max_tokens
            free -= end - self._sessions.position(request.session)
        return free

    def check_request(
        self, tokens: int, max_tokens: int, session: Session | None, parent: Session | None
    ) -> None:
        """Raise what refuses a new request whose prompt has so many tokens."""
        if session is not None and parent is not None:
            raise ConfigError("a request continues a session or forks a parent, not both")
        held = session if session is not None else parent
        before = pending = 0
        if held is not None:
            position = self._sessions.position(held)
            before = len(held.tokens)
            pending = before - position
        if session is not None and session.request is not None:
            raise SessionError(
                f"the session has an unfinished request ({session.request.number}); wait for it "
                "or cancel it, or fork the session"
            )
        if not tokens and not (pending and max_tokens):
            raise ConfigError("the prompt is empty; give at least one token")
        self._check_context(before + tokens, max_tokens)

    def check_fork(self, session: Session, up_to: int | None) -> None:
        """Raise `CapacityError` for a fork that would take what is reserved, `SessionError`."""
        held = self._sessions.position(session)
        length = held if up_to is None else up_to
        if not self._sessions.share_rows and held and length > self.free:
            raise CapacityError(
                f"a fork of {length} positions does not fit: {self.free} are neither taken nor "
                "reserved; close sessions, or make the engine with a larger capacity"
            )

    def start(self, request: Request) -> bool:
        """Start the request at the head of the queue, if it may; answers whether it did.

        Not before what runs on its parent has ended. May be called again when interrupted.
        Raises `SessionError` or `CapacityError` when its parent is gone, or has grown since.
        """
        parent, session = request.parent, request.session
        if session is None and parent is not None and _is_running(parent):
            return False
        if not self._scheduler.fits(self.need(request), self.free):
            return False
        try:
            self._check_memory(request)
        except MemoryLimitError:
            return False
        if session is None:
            session = (
                self._sessions.new(request.host) if parent is None else self._sessions.fork(parent)
            )
            request.session = session
        session.request = request
        tokens = session.tokens
        if not request.begin:
            begin, end = len(tokens) + len(request.prompt), len(tokens)
            # One statement.
            request.begin, tokens[end:] = begin, request.prompt
        unread = len(session.history.pending)
        request.started = perf_counter()
        # The last prompt token is fed by a decode pass, the first that asks for logits.
        self._scheduler.start(request, unread - 1 if request.max_tokens else unread)
        return True

    def need(self, request: Request) -> int:
        """Positions that a waiting request will take, those that its fork copies included."""
        held = request.session or request.parent
        known, position = request.begin or len(request.prompt), 0
        if held is not None:
            position = self._sessions.position(held)
            if not request.begin:
                known += len(held.tokens)
        self._check_context(known, request.max_tokens)
        is_copied = request.session is None and not self._sessions.share_rows
        return known + request.max_tokens - (0 if is_copied else position)

    def refuse_to_wait(self) -> None:
        """Raise when a request waits for room that nobody will give back.

        `MemoryLimitError` where it is memory that it waits for, else `CapacityError`.
        """
        if self._scheduler.waiting:
            request = self._scheduler.waiting[0]
            if self.need(request) <= self.free:
                self._check_memory(request)
            raise CapacityError(
                f"request {request.number} needs {self.need(request)} positions and {self.free} "
                f"of {self._sessions.cache.capacity} are free, with no other request running: "
                "idle sessions hold the rest; close some, or cancel the request"
            )

    def _check_memory(self, request: Request) -> None:
        """Raise `MemoryLimitError` unless there is memory for a request beside all that run."""
        ends = {}
        for each in self._scheduler.unread:
            assert each.session is not None, "a request that runs has a session"
            if each.session.sequence is not None:
                ends[each.session.sequence] = each.begin + each.max_tokens
        need, session = self.need(request), request.session
        if session is None:
            self._sessions.check_room(ends, (need,))
        else:
            ends[self._sessions.sequence(session)] = self._sessions.position(session) + need
            self._sessions.check_room(ends)

    def _check_context(self, known: int, max_tokens: int) -> None:
        if known + max_tokens > self._max_context:
            raise CapacityError(
                f"{known} tokens and {max_tokens} new ones need {known + max_tokens} positions, "
                f"but a session has at most {self._max_context}; ask for fewer, or make the engine "
                "with a larger capacity"
            )


def _is_running(session: Session) -> bool:
    return session.request is not None and session.request.started is not None
