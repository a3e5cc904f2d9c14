"""The sessions of an engine, and the sequences behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.control.factory import BATCHED, CELL
from mlx_kvcache.engine.requests import Session
from mlx_kvcache.engine.scheduler import Scheduler
from mlx_kvcache.errors import CapacityError, ConfigError, SessionError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.integrations.attention import Cache, FlatModel

if TYPE_CHECKING:
    from mlx_kvcache.engine.engine import Engine


class SessionStore:
    """Sessions over one cache, of which running requests have reserved a part."""

    cache: Cache
    _scheduler: Scheduler

    @property
    def cache_kind(self) -> str:
        """The kind of cache: "cell" or "batched"."""
        return CELL if isinstance(self.cache, MLXCellCache) else BATCHED

    @property
    def free(self) -> int:
        """Positions that are neither taken nor reserved by a running request."""
        return self.cache.free - self._scheduler.reserved

    @property
    def shared(self) -> int:
        """Positions that sessions hold without a cell of their own."""
        if not isinstance(self.cache, MLXCellCache):
            return 0
        cache = self.cache
        return sum(cache.position(sequence) for sequence in cache.sequences) - cache.used

    def open(self) -> Session:
        """Begin an empty session, to be continued by `submit` and ended by `close`."""
        return self._adopt(self.cache.new(), [])

    def fork(self, session: Session, up_to: int | None = None) -> Session:
        """Begin a session with the same tokens, up to a position; cells are shared, not copied.

        Raises `SessionError` (closed), `RewindError` (`up_to` beyond what is held or overwritten
        by a ring), or `CapacityError`: a batched fork takes as many positions as it has, and
        what running requests have reserved is not free.
        """
        sequence = self._sequence(session)
        held = self.cache.position(sequence)
        length = held if up_to is None else up_to
        if not isinstance(self.cache, MLXCellCache) and held and length > self.free:
            raise CapacityError(
                f"a fork of {length} positions does not fit: {self.free} are neither taken nor "
                "reserved; close sessions, or make the engine with a larger capacity"
            )
        twin = self.cache.fork(sequence, up_to)
        return self._adopt(twin, session.tokens[:] if up_to is None else session.tokens[:up_to])

    def position(self, session: Session) -> int:
        """Tokens of a session that the cache holds. Raises `SessionError` when it is closed."""
        return self.cache.position(self._sequence(session))

    def _adopt(self, sequence: int, tokens: list[int]) -> Session:
        return Session(cast("Engine", self), sequence, tokens)

    def _forget(self, session: Session) -> None:
        if session.sequence is not None:
            self.cache.remove(session.sequence)
            session.sequence = None

    def _sequence(self, session: Session) -> int:
        sequence = session.sequence
        if session.engine is not self:
            raise SessionError("the session belongs to another engine")
        if sequence is None:
            raise SessionError("the session is closed; open or fork another")
        return sequence


def make_cache(model: FlatModel, config: CacheConfig, kind: str) -> Cache:
    """An empty cache of one of the two kinds. Raises `ConfigError`, `GeometryError`."""
    if kind == CELL:
        return MLXCellCache(model.geometry, config)
    if kind == BATCHED:
        return MLXBatchedSequenceCache(model.geometry, config)
    raise ConfigError(f"the kind of cache must be {CELL!r} or {BATCHED!r}, got {kind!r}")
