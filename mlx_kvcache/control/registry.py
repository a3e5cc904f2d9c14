"""Caches by key, which of them is active here, and the session that owns a key.

A session is the only way into a registry, so no entry outlives its owner. The cache itself
outlives its key for whoever still holds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TypeVar

from mlx_kvcache.control.factory import FACTORY, MLX, SEQUENCE, CacheFactory
from mlx_kvcache.control.protocols import Cache, SequenceControl
from mlx_kvcache.errors import CacheKeyError, FaceError, NoActiveCacheError, SessionError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry

_SHOWN_KEYS = 8
_Session = TypeVar("_Session", bound="CacheSession")


class _Activation:
    """One with-body in which a cache is active.

    A task that was started inside the body inherits it; when the body ends, it ends for the task
    too, and the task no longer keeps the cache alive.
    """

    __slots__ = ("cache", "key")

    def __init__(self, key: str, cache: Cache) -> None:
        self.key = key
        self.cache: Cache | None = cache


# The innermost last. Not reset by token: bodies may end in another order than they began
# (generators), or in another context.
_ACTIVATIONS: ContextVar[tuple[_Activation, ...]] = ContextVar("mlx_kvcache.active", default=())


def _activate(key: str, cache: Cache) -> _Activation:
    activation = _Activation(key, cache)
    alive = tuple(outer for outer in _ACTIVATIONS.get() if outer.cache is not None)
    _ACTIVATIONS.set((*alive, activation))
    return activation


def _deactivate(activation: _Activation) -> None:
    activation.cache = None
    stack = _ACTIVATIONS.get()
    if activation in stack:
        _ACTIVATIONS.set(tuple(other for other in stack if other is not activation))


def current_cache() -> Cache:
    """The cache that is active here: of the innermost with-body of this thread or task.

    Raises `NoActiveCacheError` when there is none, or when the body has ended in which this task
    was started: an outer session's cache is never taken in its place.
    """
    stack = _ACTIVATIONS.get()
    if not stack:
        raise NoActiveCacheError(
            "no cache is active in this thread or task; enter a CacheSession, or "
            "registry.active(key), or pass the cache explicitly"
        )
    cache = stack[-1].cache
    if cache is None:
        raise NoActiveCacheError(
            f"the cache that was active here, {stack[-1].key}, is so no longer: its with-body has "
            "ended; enter a CacheSession, or pass the cache explicitly"
        )
    return cache


class CacheRegistry:
    """Caches by key. Entries are made by a `CacheSession` and go with it. Safe among threads."""

    def __init__(self) -> None:
        # Reentrant: a session that is garbage-collected erases its key wherever that happens.
        self._lock = threading.RLock()
        self._caches: dict[str, Cache] = {}
        self._minted = 0

    def get(self, key: str) -> Cache:
        """The cache installed under `key`. Raises `CacheKeyError`, which names the keys."""
        with self._lock:
            cache = self._caches.get(key) if isinstance(key, str) else None
        if cache is None:
            raise CacheKeyError(
                f"no cache is installed under {key!r}; there are: {_listed(self.keys())}. "
                "A key lives as long as its session is open"
            )
        return cache

    def keys(self) -> tuple[str, ...]:
        """The keys of all open sessions, oldest first."""
        with self._lock:
            return tuple(self._caches.copy())

    @contextmanager
    def active(self, key: str) -> Iterator[Cache]:
        """Make the cache of `key` the active one in the with-body. Raises `CacheKeyError`.

        It holds for this thread and for tasks started in the body. The cache stays active to the
        end of the body, even when its session is closed before.
        """
        activation = _activate(key, cache := self.get(key))
        try:
            yield cache
        finally:
            _deactivate(activation)

    def current(self) -> Cache:
        """`current_cache()`: the active cache, whichever registry it is installed in."""
        return current_cache()

    def _install(self, cache: Cache) -> str:
        with self._lock:
            self._minted += 1
            key = f"cache-{self._minted}"
            self._caches[key] = cache
        return key

    def _erase(self, key: str) -> None:
        with self._lock:
            cache = self._caches.pop(key, None)
        # The last reference may go here, outside the lock: freeing arrays takes time.
        del cache


def _listed(keys: tuple[str, ...]) -> str:
    if len(keys) <= _SHOWN_KEYS:
        return ", ".join(keys) or "none"
    return f"{', '.join(keys[:_SHOWN_KEYS])} and {len(keys) - _SHOWN_KEYS} more"


#: The registry that sessions use unless they are given another one.
REGISTRY = CacheRegistry()


class CacheSession:
    """The owner of a cache's key: builds the cache, installs it, and erases the key at the end.

    As a context manager it also makes the cache the active one in its body:

        with CacheSession(geometry, config) as session:
            session.control.can_extend(100)

    Without `with`, `open()` and `close()` do the rest. A session runs once: `close` is final, and
    may be repeated. A session that is dropped while open is closed when Python collects it.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        config: CacheConfig | None = None,
        *,
        backend: str = MLX,
        kind: str = SEQUENCE,
        factory: CacheFactory = FACTORY,
        registry: CacheRegistry = REGISTRY,
    ) -> None:
        if not callable(getattr(factory, "build", None)) or isinstance(factory, type):
            raise FaceError(
                f"a session builds its cache with a CacheFactory, got {type(factory).__name__}"
            )
        self._begin(partial(factory.build, backend, kind, geometry, config), registry)

    @classmethod
    def around(
        cls: type[_Session], cache: Cache, *, registry: CacheRegistry = REGISTRY
    ) -> _Session:
        """A session for a cache that exists already. Raises `FaceError` if it is not a cache."""
        if not isinstance(cache, Cache) or isinstance(cache, type):
            raise FaceError(
                f"a session takes a cache, which has geometry, config, capacity and nbytes; got "
                f"{type(cache).__name__}"
            )
        session = cls.__new__(cls)
        session._begin(lambda: cache, registry)
        return session

    def _begin(self, make: Callable[[], Cache], registry: CacheRegistry) -> None:
        if not isinstance(registry, CacheRegistry):
            raise FaceError(
                f"a session installs its cache in a CacheRegistry, got {type(registry).__name__}"
            )
        self._lock = threading.RLock()
        self._registry = registry
        self._make: Callable[[], Cache] | None = make
        self._cache: Cache | None = None
        self._key = ""
        self._erase: Callable[[], object] | None = None
        self._activation: _Activation | None = None

    @property
    def is_open(self) -> bool:
        """Whether the key is installed."""
        return self._cache is not None

    @property
    def key(self) -> str:
        """The key, from the first `open` on. Raises `SessionError` before."""
        if not self._key:
            raise SessionError("this session has no key yet; open or enter it first")
        return self._key

    @property
    def cache(self) -> Cache:
        """The cache of the open session. Raises `SessionError` before and after."""
        cache = self._cache
        if cache is None:
            raise SessionError(
                f"{self!r} holds no cache; open or enter it first, and keep a reference to the "
                "cache if you need it after the session"
            )
        return cache

    @property
    def control(self) -> SequenceControl:
        """The cache, as what an application calls between steps.

        Raises `FaceError` for a cache of another kind, and what `cache` raises.
        """
        cache = self.cache
        if not isinstance(cache, SequenceControl):
            raise FaceError(
                f"{type(cache).__name__} does not hold one sequence, so it lacks the calls of "
                "SequenceControl; use session.cache and its own verbs"
            )
        return cache

    def open(self: _Session) -> _Session:
        """Build and install the cache; nothing, when it is open. Does not make it active.

        Raises `SessionError` for a closed session. When the builder raises, nothing is installed,
        and the session may be opened again.
        """
        with self._lock:
            if self._cache is None:
                if self._make is None:
                    raise SessionError(
                        f"{self!r} cannot be opened again; make a new session, which may be "
                        "CacheSession.around(cache) for a cache that you still hold"
                    )
                cache = self._make()
                self._key = self._registry._install(cache)
                self._erase = weakref.finalize(self, self._registry._erase, self._key)
                self._cache = cache
        return self

    def close(self) -> None:
        """Erase the key and let go of the cache. May be repeated; a closed session stays closed."""
        with self._lock:
            self._make = None
            self._cache = None
            if self._erase is not None:
                self._erase()

    def __enter__(self: _Session) -> _Session:
        with self._lock:
            if self._activation is not None:
                raise SessionError(
                    f"{self!r} has been entered already; use registry.active(session.key) to make "
                    "its cache active in another place"
                )
            self.open()
            self._activation = _activate(self.key, self.cache)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        activation, self._activation = self._activation, None
        try:
            if activation is not None:
                _deactivate(activation)
        finally:
            self.close()

    def __repr__(self) -> str:
        if self._cache is not None:
            return f"<{type(self).__name__} {self._key}, open>"
        state = "not yet open" if self._make is not None else "closed"
        return f"<{type(self).__name__} {self._key or 'without a key'}, {state}>"
