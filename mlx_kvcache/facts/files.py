"""Files that come to be whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file to write to, which takes the place of `path` unless something raises.

    A reader sees the old file or the whole new one, never a part. A link is replaced, and not what
    it leads to; an old file keeps its permissions. mode: those of a new one, less what the process
    withholds. Raises `OSError`, also where a device, a pipe or a directory would be gone.
    """
    old = path.lstat() if os.path.lexists(path) else None
    if old is not None and not (stat.S_ISREG(old.st_mode) or stat.S_ISLNK(old.st_mode)):
        raise FileExistsError(errno.EEXIST, "there is something that is no plain file", str(path))
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        if old is not None and stat.S_ISREG(old.st_mode):
            os.chmod(partial, stat.S_IMODE(old.st_mode))
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
