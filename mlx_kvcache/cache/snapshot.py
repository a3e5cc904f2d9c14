"""What a cache held at some moment, as a value that later steps do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_kvcache.errors import SnapshotError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry

Held = TypeVar("Held")


@dataclass(frozen=True, eq=False)
class Snapshot(Generic[Held]):
    """A moment of a cache, to be put back by `restore` of any cache of the same kind.

    MLX arrays are values, so a snapshot copies nothing: the next write of the cache does, once.

    geometry, config: those of the cache. held: what its kind of cache holds, which nobody changes.
    arrays: the rows in it. states: of layers that keep no rows (recurrent ones), which only a
    prompt cache has.
    """

    kind: str
    geometry: CacheGeometry
    config: CacheConfig
    held: Held
    arrays: tuple[mx.array, ...]
    states: tuple[dict[str, Any], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and states, those included that the cache still shares with it."""
        leaves: Any = tree_flatten([*self.arrays, *self.states])
        held = {id(leaf): leaf for _, leaf in leaves if isinstance(leaf, mx.array)}
        return sum(array.nbytes for array in held.values())


def check_fits(
    snapshot: Snapshot[Any], kind: str, geometry: CacheGeometry, config: CacheConfig
) -> None:
    """Raise `SnapshotError` unless a cache of these can hold what the snapshot holds."""
    if not isinstance(snapshot, Snapshot) or snapshot.kind != kind:
        got = snapshot.kind if isinstance(snapshot, Snapshot) else type(snapshot).__name__
        raise SnapshotError(
            f"a cache of the kind {kind!r} restores snapshots of that kind, got {got!r}; take the "
            "snapshot from a cache of the same kind"
        )
    if snapshot.geometry != geometry or snapshot.config != config:
        what = "geometry" if snapshot.geometry != geometry else "config"
        raise SnapshotError(
            f"the snapshot was taken from a cache of another {what}; make the cache with the "
            f"{what} of the snapshot, which it holds as `{what}`"
        )
