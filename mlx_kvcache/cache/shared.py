"""What the caches of many sequences have in common: ids, declared steps, verbs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_kvcache.cache.attend import Layout, Running, SharedAttention
from mlx_kvcache.errors import CapacityError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry


class MLXSharedCache(SharedAttention[Layout, Running]):
    """The keys and values of many sequences, and a step that runs over some of them at once.

    shares_rows: whether sequences with a common beginning hold its rows once.
    Every refused call raises a typed error and changes nothing.
    """

    shares_rows = False

    def __init__(self, geometry: CacheGeometry, config: CacheConfig | None) -> None:
        config = CacheConfig() if config is None else config
        validate(geometry, config)
        super().__init__(geometry)
        self.config = config
        self.layout: Layout = self._make_layout()

    @abstractmethod
    def _make_layout(self) -> Layout:
        """The layout that keeps the sequences apart."""

    @abstractmethod
    def new(self) -> int:
        """Begin an empty sequence and answer its id, the lowest that is not in use."""

    @abstractmethod
    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence with the same history, up to a position, and answer its id."""

    @abstractmethod
    def remove(self, sequence: int) -> None:
        """Forget a sequence. Raises `UnknownSequenceError`."""

    @abstractmethod
    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on."""

    @abstractmethod
    def _check_room(self, ends: Mapping[int, int], begun: Sequence[int]) -> None:
        """Raise `MemoryLimitError` as `check_room`, whose arguments were checked."""

    def check_room(self, ends: Mapping[int, int], begun: Sequence[int] = ()) -> None:
        """Raise `MemoryLimitError` unless there is memory for sequences to reach these lengths.

        ends: of live sequences, by id. begun: of others, yet to begin. Nothing is taken. Until
        a row was written, rows count in 16 bits unless `config.kv_dtype` says more.
        """
        if not isinstance(ends, Mapping) or not isinstance(begun, list | tuple):
            raise CapacityError(
                "lengths are asked for by sequence id, and in a list for sequences yet to begin, "
                f"got {shortened(ends)} and {shortened(begun)}"
            )
        layout = self._settled()
        limit = self.layout.max_context or self.capacity
        for end in (*ends.values(), *begun):
            if not is_integer(end, 0, min(limit, self.capacity)):
                raise CapacityError(
                    f"a sequence of {shortened(end)} positions cannot be: from 0 to "
                    f"{min(limit, self.capacity)} can"
                )
        for sequence in ends:
            layout.position(sequence)
        self._check_room(ends, begun)

    @property
    @abstractmethod
    def state(self) -> list[mx.array]:
        """Every array that is alive in the cache, for `mx.eval`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def capacity(self) -> int:
        """The most positions that all sequences may hold together."""
        return self.layout.capacity

    @property
    def used(self) -> int:
        """How much of the capacity is taken."""
        return self._settled().used

    @property
    def free(self) -> int:
        """How many more tokens fit."""
        return self._settled().free

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of the live sequences, ascending."""
        return self._settled().sequences

    @property
    def unfinished(self) -> Mapping[int, int]:
        """The sequences whose newest step some layers have not written, and where it started."""
        return self._settled().unfinished

    def position(self, sequence: int) -> int:
        """Positions that a sequence holds: its next token's. Raises `UnknownSequenceError`."""
        return self._settled().position(sequence)

    def abandon_step(self) -> None:
        """Take back the step that is declared or was not finished.

        Its sequences stand where they stood before it. Completes a rewind that was interrupted.
        """
        layout = self._settled()
        layout.retract_declaration()
        for sequence, start in layout.unfinished.items():
            self.rewind(sequence, start)

    def _settled(self) -> Layout:
        """The layout, once an interrupted verb has been carried out."""
        if self._pending is not None:
            self._pending()
        return self.layout
