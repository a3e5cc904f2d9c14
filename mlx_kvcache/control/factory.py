"""The factory: which builder makes the cache of a (backend, kind), from geometry and config.

Other packages add kinds through the entry-point group `mlx_kvcache.caches`:

    [project.entry-points."mlx_kvcache.caches"]
    "acme/paged" = "acme_cache:PagedCache"

The name is "backend/kind", the value a builder. Names are read when a factory is first asked;
a builder is imported when its own kind is first built, so one that cannot be imported troubles
nobody else.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from mlx_kvcache.control.protocols import Cache
from mlx_kvcache.errors import BuilderError, CacheKindError, RegistrationError
from mlx_kvcache.facts.checks import shortened
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Makes a cache. It may be called from several threads at once.
Builder = Callable[[CacheGeometry, CacheConfig], Cache]
#: (backend, kind).
Pair = tuple[str, str]

ENTRY_POINT_GROUP = "mlx_kvcache.caches"
#: The backend of this package, and its kinds: for one sequence or a batch that advances together,
#: for many sequences that share cells, and for many with pools of their own.
MLX = "mlx"
SEQUENCE = "sequence"
CELL = "cell"
BATCHED = "batched"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class CacheFactory:
    """Builders by (backend, kind). Insertion only: what is registered is never replaced.

    `builders` are there from the start; those of the entry points in `group` (None: of no group)
    come next, and those of `register` last. Safe to use from several threads.
    """

    def __init__(
        self, builders: Mapping[Pair, Builder] | None = None, group: str | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._builders: dict[Pair, Builder] = {}
        self._pending_group = group
        given = {} if builders is None else builders
        if not isinstance(given, Mapping) or not (group is None or isinstance(group, str)):
            raise RegistrationError(
                "builders come by (backend, kind), and a group of entry points by its name, got "
                f"{shortened(builders)} and {shortened(group)}"
            )
        for pair, builder in given.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise RegistrationError(f"a builder is for (backend, kind), got {shortened(pair)}")
            self._insert(*pair, builder)

    def register(self, backend: str, kind: str, builder: Builder) -> None:
        """Add a builder. Raises `RegistrationError`, and changes nothing, for a pair that is
        taken, a name that no entry point could carry, or a builder that is not callable.
        """
        self._discover()
        with self._lock:
            self._insert(backend, kind, builder)

    def kinds(self) -> tuple[Pair, ...]:
        """Every (backend, kind) that can be asked for, sorted."""
        self._discover()
        with self._lock:
            return tuple(sorted(self._builders))

    def build(
        self, backend: str, kind: str, geometry: CacheGeometry, config: CacheConfig | None = None
    ) -> Cache:
        """A new cache. The builder runs outside the lock; what it raises passes through.

        Raises `GeometryError` or `ConfigError` when the two do not fit together, `CacheKindError`
        for a pair without a builder, `BuilderError` when the builder cannot be loaded or answers
        with something that is not a cache.
        """
        config = CacheConfig() if config is None else config
        validate(geometry, config)
        cache: object = self._builder(backend, kind)(geometry, config)
        # A class has the members of its objects, but it is not one of them.
        if not isinstance(cache, Cache) or isinstance(cache, type):
            raise BuilderError(
                f"the builder of {_label(backend, kind)} answered with {_described(cache)}, which "
                "is not a cache; it must return an object with geometry, config, capacity and "
                "nbytes"
            )
        return cache

    def _builder(self, backend: str, kind: str) -> Builder:
        self._discover()
        with self._lock:
            try:
                return self._builders[backend, kind]
            except (KeyError, TypeError):
                known = ", ".join(_label(*pair) for pair in sorted(self._builders)) or "none"
        raise CacheKindError(
            f"no cache kind {_label(backend, kind)} is registered; there are: {known}. "
            "Register a builder for it, or install the package that brings it"
        )

    def _insert(self, backend: str, kind: str, builder: Builder) -> None:
        for word, name in (("backend", backend), ("kind", kind)):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise RegistrationError(
                    f"a {word} is named by letters, digits, '_', '.' and '-', got {name!r}"
                )
        if not callable(builder):
            raise RegistrationError(
                f"the builder of {_label(backend, kind)} must be callable as "
                f"builder(geometry, config), got {_described(builder)}"
            )
        if (backend, kind) in self._builders:
            raise RegistrationError(
                f"{_label(backend, kind)} has a builder already, which is kept; register the new "
                "one under another kind"
            )
        self._builders[backend, kind] = builder

    def _discover(self) -> None:
        group = self._pending_group
        if group is None:
            return
        from importlib.metadata import entry_points

        found = sorted(entry_points(group=group), key=lambda point: (point.name, point.value))
        refused = []
        with self._lock:
            if self._pending_group is None:
                return
            self._pending_group = None
            for point in found:
                backend, _, kind = point.name.partition("/")
                try:
                    self._insert(backend, kind, _EntryPointBuilder(point))
                except RegistrationError as error:
                    refused.append(f"{_origin(point)} is left out: {error}")
        for message in refused:
            warnings.warn(message, RuntimeWarning, stacklevel=3)


class _EntryPointBuilder:
    """The builder of an entry point, imported at its first call."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        self._loaded: Builder | None = None

    def __call__(self, geometry: CacheGeometry, config: CacheConfig) -> Cache:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded(geometry, config)

    def _load(self) -> Builder:
        try:
            loaded: Builder = self._point.load()
        except Exception as error:
            raise BuilderError(
                f"{_origin(self._point)} cannot be loaded: {error!r}; repair or remove the "
                "package that brings it"
            ) from error
        if not callable(loaded):
            raise BuilderError(
                f"{_origin(self._point)} must lead to a callable builder(geometry, config), "
                f"but it leads to {_described(loaded)}"
            )
        return loaded


def _origin(point: EntryPoint) -> str:
    package = f" of {point.dist.name}" if point.dist is not None else ""
    return f"the entry point {point.name!r} = {point.value!r}{package}"


def _label(backend: object, kind: object) -> str:
    return f"{backend}/{kind}"


def _described(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def _own(module: str, name: str) -> Builder:
    """A cache class of this package, whose module needs MLX and is imported when one is built."""

    def build(geometry: CacheGeometry, config: CacheConfig) -> Cache:
        made: Cache = getattr(import_module(f"mlx_kvcache.cache.{module}"), name)(geometry, config)
        return made

    return build


#: The factory that sessions use unless they are given another one.
FACTORY = CacheFactory(
    {
        (MLX, SEQUENCE): _own("sequence", "MLXSequenceCache"),
        (MLX, CELL): _own("cells", "MLXCellCache"),
        (MLX, BATCHED): _own("batched", "MLXBatchedSequenceCache"),
    },
    ENTRY_POINT_GROUP,
)
