"""What a cache lets others do, by who calls it and when: protocols, checked by structure.

The application calls `SequenceControl`, or `SharedControl` of a cache of many sequences, between
steps. During a step, attention calls `AttentionBackend`, and the byte layer asks a
`SequencePlanner` for rows. A cache subclasses none of them: having the members is enough, for a
type checker and for `isinstance`, which looks at the names only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.layout.runs import StepPlan
from mlx_kvcache.layout.steps import DeclaredStep, SpanRequest

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_kvcache.cache.arguments import Positions


@runtime_checkable
class Cache(Protocol):
    """What every cache has, whatever it holds: a factory and a registry take nothing less."""

    @property
    def geometry(self) -> CacheGeometry:
        """The cache layers of the model that it serves."""

    @property
    def config(self) -> CacheConfig:
        """What the run chose."""

    @property
    def capacity(self) -> int:
        """The most positions it will hold."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""


@runtime_checkable
class SequenceControl(Cache, Protocol):
    """What an application may call between steps, on a cache that holds one sequence.

    Every call that is refused raises a typed error and changes nothing.
    """

    @property
    def length(self) -> int:
        """Positions held: the next token's position."""

    @property
    def rewind_floor(self) -> int:
        """The lowest position, other than 0, that `rewind` can reach now."""

    @property
    def nbytes_used(self) -> int:
        """Bytes of the rows that hold a remembered position."""

    def can_extend(self, count: int = 1) -> bool:
        """Whether `count` more positions fit."""

    def reserve(self, length: int) -> None:
        """Grow once, now, so that `length` positions need no further growth."""

    def rewind(self, position: int) -> None:
        """Forget every position from `position` on."""

    def clear(self) -> None:
        """Forget every position; what is allocated stays."""


@runtime_checkable
class SequencePlanner(Protocol):
    """The integer side of a step of one sequence: which rows are written, which may be read.

    `plan` is pure; `commit` takes the maximum, so once a step or once a layer is the same.
    """

    @property
    def length(self) -> int:
        """Positions committed."""

    @property
    def capacity(self) -> int:
        """The most positions that can be committed."""

    def admit(self, position: int, count: int) -> None:
        """Raise unless a step of `count` rows at `position` may run now."""

    def plan(self, layer: int, position: int, count: int) -> StepPlan:
        """What a step of `count` rows at `position` writes and reads in `layer`."""

    def commit(self, plan: StepPlan) -> None:
        """Record that a planned step was written."""


@runtime_checkable
class AttentionBackend(Protocol):
    """What attention calls during a step, on every cache: the seam. Arrays are `[B, H, rows, D]`.

    A cache of many sequences takes the tokens of a declared step as one row, `[1, H, T, D]`.
    """

    @property
    def state(self) -> list[mx.array]:
        """Every array that is alive in the cache, for `mx.eval`."""

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        *,
        softcap: float | None = None,
        out_dtype: mx.Dtype | None = None,
        positions: Positions | None = None,
    ) -> mx.array:
        """Write the step into a cache layer and attend each token to what it may see."""


@runtime_checkable
class SharedControl(Cache, Protocol):
    """What an application may call between steps, on a cache that holds many sequences.

    Every call that is refused raises a typed error and changes nothing.
    """

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of the live sequences, ascending."""

    @property
    def used(self) -> int:
        """How much of the capacity is taken."""

    @property
    def free(self) -> int:
        """How many more tokens fit."""

    @property
    def unfinished(self) -> Mapping[int, int]:
        """The sequences whose newest step some layers have not written, and where it started."""

    def new(self) -> int:
        """Begin an empty sequence and answer its id."""

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence with the same history, up to a position, and answer its id."""

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""

    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on."""

    def position(self, sequence: int) -> int:
        """Positions that a sequence holds: its next token's."""

    def declare_step(
        self, request: SpanRequest, positions: Sequence[int] | None = None
    ) -> DeclaredStep:
        """Admit the next step: (sequence id, number of tokens) for each span."""

    def abandon_step(self) -> None:
        """Take back the step that is declared or was not finished."""


@runtime_checkable
class StepBackend(AttentionBackend, Protocol):
    """What a model calls besides during a step over many sequences."""

    def step_positions(self) -> mx.array:
        """The position of each token, int32 [T], for rotary embeddings."""

    def attend_again(
        self,
        layer: int,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        *,
        softcap: float | None = None,
        out_dtype: mx.Dtype | None = None,
    ) -> mx.array:
        """Attend other queries to a layer that has written the running step already."""
