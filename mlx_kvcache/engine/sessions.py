"""The sessions of an engine, and the sequences behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from mlx_kvcache.control.history import TokenHistory
from mlx_kvcache.control.protocols import SharedControl, StepBackend
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.engine.requests import Host, Session
from mlx_kvcache.errors import FaceError, SessionError


@runtime_checkable
class SharedCache(SharedControl, StepBackend, Protocol):
    """A cache of many sequences over which a model runs in steps."""


def shared_cache(owner: CacheSession) -> SharedCache:
    """The cache of a session of the registry, which is closed for another. Raises `FaceError`."""
    cache = owner.cache
    if not isinstance(cache, SharedCache):
        owner.close()
        raise FaceError(
            f"an engine needs a cache that many sequences share, not a {type(cache).__name__}; "
            'take the kind "cell" or "batched"'
        )
    return cache


class Sequence:
    """One sequence of a shared cache, as a history takes it."""

    def __init__(self, cache: SharedCache, identity: int) -> None:
        self._cache = cache
        self._identity = identity

    @property
    def length(self) -> int:
        """Positions that every layer holds."""
        unfinished = self._cache.unfinished.get(self._identity)
        return self._cache.position(self._identity) if unfinished is None else unfinished

    def rewind(self, position: int) -> None:
        """Forget the positions from `position` on. Raises `RewindError`."""
        self._cache.rewind(self._identity, position)


class Sessions:
    """Sessions over one cache, whose sequences are theirs alone. Holds none of them.

    share_rows: whether a fork copies none.
    """

    def __init__(self, cache: SharedCache) -> None:
        self.cache = cache
        self.share_rows: bool = getattr(cache, "shares_rows", False)
        self._live: WeakSet[Session] = WeakSet()

    @property
    def shared(self) -> int:
        """Positions that sessions hold without a cell of their own."""
        if not self.share_rows:
            return 0
        return sum(map(self.cache.position, self.cache.sequences)) - self.cache.used

    def check_room(self, ends: Mapping[int, int], begun: tuple[int, ...] = ()) -> None:
        """Raise `MemoryLimitError` unless sequences can reach these lengths, and others begin.

        Nothing where the cache, another package's perhaps, does not say.
        """
        check = getattr(self.cache, "check_room", None)
        if check is not None:
            check(ends, begun)

    def new(self, host: Host) -> Session:
        """An empty session."""
        return self._adopt(host, self.cache.new(), [])

    def fork(self, session: Session, up_to: int | None = None) -> Session:
        """A session with the same tokens, up to a position. Raises what the cache raises."""
        twin = self.cache.fork(self.sequence(session), up_to)
        return self._adopt(session.host, twin, session.tokens[:up_to])

    def forget(self, session: Session) -> None:
        """Give back what a session holds; nothing, when it is closed."""
        # A session that is closed holds nothing: an interrupt leaves it open until then.
        if session.sequence in self.cache.sequences:
            self.cache.remove(session.sequence)
        session.sequence = None
        self._live.discard(session)

    def forget_all(self) -> None:
        """Give back what all sessions hold."""
        for session in tuple(self._live):
            self.forget(session)

    def defragment(self) -> None:
        """Where rows are shared, move them together: what no session holds is dropped."""
        if self.share_rows:
            self.cache.defragment()  # type: ignore[attr-defined]

    @property
    def have_lost(self) -> bool:
        """Whether a session was dropped unclosed, by its user or with an interrupted verb."""
        return len(self.cache.sequences) != len(self._live)

    def sweep(self) -> None:
        """Remove sequences without a session, and the reverse: a verb was interrupted."""
        for session in tuple(self._live):
            if session.sequence not in self.cache.sequences:
                self.forget(session)
        held = {session.sequence for session in self._live}
        for sequence in self.cache.sequences:
            if sequence not in held:
                self.cache.remove(sequence)

    def position(self, session: Session) -> int:
        """Positions that the cache holds of a session. Raises `SessionError`."""
        return self.cache.position(self.sequence(session))

    def sequence(self, session: Session) -> int:
        """The sequence of a session. Raises `SessionError`."""
        if not isinstance(session, Session):
            raise SessionError(
                f"a session is what open and fork answer, got {type(session).__name__}"
            )
        if session.sequence is None:
            raise SessionError("the session is closed; open or fork another")
        if session not in self._live:
            raise SessionError("the session belongs to another engine")
        return session.sequence

    def _adopt(self, host: Host, sequence: int, tokens: list[int]) -> Session:
        session = Session(host, sequence, TokenHistory(Sequence(self.cache, sequence), tokens))
        self._live.add(session)
        return session
