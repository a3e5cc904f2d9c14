"""What is in the cache directory: listed, and deleted without harm to whoever is at work there."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from filelock import FileLock, Timeout

from mlx_kvcache.errors import ModelInUseError
from mlx_kvcache.facts.files import expanded
from mlx_kvcache.models.convert import entry_suffix
from mlx_kvcache.models.demos import DEMOS
from mlx_kvcache.models.store import (
    SOURCE,
    Source,
    home,
    is_complete,
    lock_path,
    partial_path,
    read_source,
)

#: The names that this package gives, in all its versions. The cache directory may be any one that
#: a person chose, so nothing else in it is touched.
_OWN = re.compile(
    rf"(gguf-.*[0-9a-f]{{16}}|(?:{'|'.join(map(re.escape, DEMOS))})(?=-v))(-v\d+(-packed)?)?"
)
_PARTIAL, _REMOVED = ".partial", ".removed"


class State(StrEnum):
    """Whether an entry can be loaded, and what it is otherwise."""

    READY = "ready"
    EARLIER = "earlier version"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Entry:
    """One converted model, or what an interrupted build or deletion left of it.

    nbytes: of all its files. used: when it was last loaded by its name, in seconds since 1970.
    source: what it was made of; None where that is not known.
    """

    name: str
    state: State
    nbytes: int
    used: float
    source: Source | None

    @property
    def directory(self) -> Path:
        """Where it is."""
        return home() / self.name

    def is_called(self, name: str) -> bool:
        """Whether `name` means it: its own, its demo's, its file's, or the path of that."""
        names = {self.name, self.name.partition("-v")[0]}
        if self.source is not None:
            names |= {self.source.name, self.source.origin}
        return name in names or os.path.realpath(expanded(name)) in names


def entries() -> tuple[Entry, ...]:
    """What is in the cache directory, the last used first."""
    names = {name for path in _children() if (name := _entry_name(path)) is not None}
    return tuple(sorted((_entry(name) for name in names), key=lambda e: (-e.used, e.name)))


def delete(name: str) -> None:
    """Delete the entry of that name, with all that was left of it.

    Whoever has loaded the model keeps it: its files are open. Raises ModelInUseError while a
    process makes it, and OSError.
    """
    final = home() / name
    lock = FileLock(lock_path(final))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ModelInUseError(
            f"{name} is being made by another process right now; wait for it, or stop it"
        ) from error
    try:
        removed = _removed_path(final)
        _remove(removed)
        # A reader sees the whole model or none.
        if final.exists():
            os.rename(final, removed)
        _remove(removed)
        _remove(partial_path(final))
    finally:
        lock.release()


def _children() -> list[Path]:
    try:
        return [path for path in home().iterdir() if path.is_dir()]
    except OSError:
        return []


def _entry_name(path: Path) -> str | None:
    """The name of the entry that the directory belongs to; None for what is not ours."""
    name = path.name
    if name.startswith(".") and path.suffix in (_PARTIAL, _REMOVED):
        name = name[1:].removesuffix(path.suffix)
    return name if _OWN.fullmatch(name) else None


def _entry(name: str) -> Entry:
    final = home() / name
    current = name.endswith((entry_suffix(packed=False), entry_suffix(packed=True)))
    state = State.READY if current else State.EARLIER
    if not is_complete(final):
        state = State.UNFINISHED
    places = (final, partial_path(final), _removed_path(final))
    return Entry(
        name, state, sum(_size(place) for place in places), _used(final), read_source(final)
    )


def _removed_path(final: Path) -> Path:
    return final.parent / f".{final.name}{_REMOVED}"


def _used(final: Path) -> float:
    for path in (final / SOURCE, final / "config.json", final, partial_path(final)):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _size(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            # It may be deleted, or renamed, meanwhile.
            with suppress(OSError):
                total += (Path(root) / name).lstat().st_size
    return total


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
