"""Files that people name, and files that come to be whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from mlx_kvcache.errors import ConfigError

#: Links that are followed one after the other, as by Linux.
_MOST_LINKS = 40
#: Links in here lead to what is open, whatever the name that they show.
_OPEN_FILES = "/proc"


def expanded(name: str | PathLike[str]) -> Path:
    """The path that a person means, `~` replaced. Raises `ConfigError` for what is no name."""
    try:
        path = Path(name).expanduser()
        if b"\0" in os.fsencode(path):
            raise ValueError("embedded null byte")
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{name!r} is no name of a file: {error}; give another name") from error
    return path


@contextmanager
def replacing(path: Path, mode: int | None = None, follow: bool = False) -> Iterator[Path]:
    """An empty file to write to, which takes the place of `path` unless something raises.

    A reader sees the old file or the whole new one, never a part. The new one belongs to who
    writes it; from an old one it has the group and the permissions, less the group's where that
    one cannot be had. mode: its permissions in place of those, less what the process withholds.
    follow: whether a link stays, and what it leads to is replaced. Raises `OSError`, also where a
    device, a pipe or a directory would be gone.
    """
    if follow:
        path = _end_of_links(path)
    old = path.lstat() if os.path.lexists(path) and not path.is_symlink() else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise _no_plain_file(path)
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    if mode is not None:
        old = None
    # Until it is whole, it is for nobody that the old one may not be for.
    first = mode or (0o666 if old is None else 0o600)
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, first))
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        if old is not None:
            _permit(partial, old)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _permit(partial: Path, old: os.stat_result) -> None:
    permissions = old.st_mode & 0o777
    if partial.stat().st_gid != old.st_gid:
        try:
            os.chown(partial, -1, old.st_gid)
        except OSError:
            permissions &= ~stat.S_IRWXG
    partial.chmod(permissions)


def _end_of_links(path: Path) -> Path:
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent, strict=True), path.name)
        if not path.is_symlink():
            return path
        if path.is_relative_to(_OPEN_FILES):
            raise _no_plain_file(path)
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _no_plain_file(path: Path) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST, "what is there is no plain file, and stays; give another name", str(path)
    )
