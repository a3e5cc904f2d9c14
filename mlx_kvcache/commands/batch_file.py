"""The file that `batch` writes results to: whole lines, one writer, nothing lost when it ends."""

from __future__ import annotations

import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mlx_kvcache.errors import ConfigError

#: How often what was written is made to survive a power cut. A killed process loses nothing.
SYNC_SECONDS = 2.0


def hold(path: Path) -> int | None:
    """A descriptor of the file there, locked until it is closed; None where there is no file.

    Raises `ConfigError` for anything but a regular file, or one that another run holds, `OSError`.
    """
    try:
        # A pipe would keep the opening waiting.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(
                f"--output {path} is not a regular file; give one, or leave --output out and "
                "redirect standard output"
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _lock(descriptor, path)
        if not _is_at(descriptor, path):
            raise ConfigError(f"--output {path} was replaced just now, by another run; try again")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class ResultsFile:
    """Appends results, one a line, to a file that this run alone holds.

    All lines are whole, but for a last one whose writer was killed. `new`, `extended` and
    `replacement` make one; it is a context, and gives the file free at its end, or takes it away
    again when it is new and nothing was written to it. Raises `OSError`.
    """

    def __init__(self, path: Path, descriptor: int, start: int, own: Path | None) -> None:
        self._path = path
        self._descriptor = descriptor
        self._start = start
        # What is to go again when nothing is written: the file, or what will replace it.
        self._own = own
        # Where each number's line ends: one entry, so that a line is known or is written again
        # in the same place.
        self._ends: dict[int, int] = {}
        self._synced = time.monotonic()

    @classmethod
    def new(cls, path: Path) -> ResultsFile:
        """A file that is not there yet. Raises `ConfigError` when it is."""
        try:
            descriptor = _create(path, 0o666)
        except FileExistsError as error:
            raise ConfigError(f"--output {path} was made just now, by another run") from error
        return cls(path, descriptor, 0, path)

    @classmethod
    def extended(cls, path: Path, held: int, end: int) -> ResultsFile:
        """The file that `hold` has answered; what lies behind `end` is overwritten."""
        return cls(path, os.dup(held), end, None)

    @classmethod
    def replacement(cls, path: Path, held: int, kept: bytes) -> ResultsFile:
        """Another file that begins with `kept`, and takes the place of a held one.

        It does so with its first result, whole: until then the old one stands as it is.
        """
        partial = path.with_name(f".{uuid.uuid4().hex}.partial")
        descriptor = _create(partial, stat.S_IMODE(os.fstat(held).st_mode))
        results = cls(path, descriptor, len(kept), partial)
        try:
            _write_at(descriptor, kept, 0)
        except BaseException:
            results.close()
            raise
        return results

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, number: int, line: Callable[[], str]) -> None:
        """Append the line of a number, unless it was written already."""
        if number in self._ends:
            return
        data, end = line().encode(), self._end
        try:
            if not self._ends:
                # The rest of a line whose writer was killed.
                os.ftruncate(self._descriptor, end)
            _write_at(self._descriptor, data, end)
            self._take_place()
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise self._told(error) from error
        self._ends[number] = end + len(data)
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.finish()

    def finish(self) -> None:
        """See that what was written survives a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._told(error) from error
        self._synced = time.monotonic()

    def close(self) -> None:
        """Give the file free; a new one without results goes."""
        descriptor, own = self._descriptor, self._own
        if descriptor < 0:
            return
        # What is interrupted between the writing of a line and the note of it is written.
        is_empty = own != self._path or not os.fstat(descriptor).st_size
        if own is not None and is_empty and _is_at(descriptor, own):
            own.unlink()
        self._descriptor = -1
        os.close(descriptor)

    @property
    def _end(self) -> int:
        return next(reversed(self._ends.values()), self._start)

    def _take_place(self) -> None:
        """Put the file where it belongs. Raises `OSError` when it was taken away from there."""
        if _is_at(self._descriptor, self._path):
            return
        if self._ends or self._own in (None, self._path):
            raise FileNotFoundError(2, "the file was moved or deleted", str(self._path))
        assert self._own is not None, "what replaces a file has a name of its own"
        os.fsync(self._descriptor)
        os.replace(self._own, self._path)
        _sync_directory(self._path)

    def _told(self, error: OSError) -> OSError:
        what = f"{error.strerror}; --resume keeps the results that are in the file"
        return OSError(error.errno, what, str(self._path))


def _create(path: Path, mode: int) -> int:
    """A descriptor of a new, locked file. Raises `FileExistsError`."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        _lock(descriptor, path)
        _sync_directory(path)
    except ConfigError:
        # Another run was quicker, and has the file now.
        os.close(descriptor)
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing to --output {path}; wait for it, or give another name"
        ) from error
    except OSError as error:
        raise OSError(error.errno, f"no lock: {error.strerror}", str(path)) from error


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _sync_directory(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Not every file system can.
        with suppress(OSError):
            os.fsync(directory)
    finally:
        os.close(directory)
