"""What an earlier run of `batch` has left in its file, and how this one goes on there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlx_kvcache.commands.batch_file import ResultsFile, hold
from mlx_kvcache.commands.batch_input import Prompt
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.json_text import read_json

#: What every result begins with.
_BEGINNING = b'{"line": '


@dataclass(frozen=True)
class Earlier:
    """The results that stand in a file. All bytes of whole lines: size, those to keep: kept.

    hashes: what was asked, by the number of the input line, for each that was answered. A result
    with an error is not kept: its line is answered anew.
    """

    hashes: dict[int, str] = field(default_factory=dict)
    kept: bytes = b""
    size: int = 0


@dataclass(frozen=True)
class Claim:
    """A place for results that no other run can take.

    held: what stands there, None for nothing. earlier: its results, None when they are to go.
    """

    path: Path
    held: int | None
    earlier: Earlier | None

    def answered(self, prompts: Sequence[Prompt]) -> frozenset[int]:
        """The lines that need no answer any more.

        Raises `ConfigError` for a result whose line asks for something else now.
        """
        hashes = {} if self.earlier is None else self.earlier.hashes
        asked = {prompt.line: prompt.hash for prompt in prompts if prompt.line in hashes}
        for number, hashed in hashes.items():
            if asked.get(number) != hashed:
                raise ConfigError(
                    f"--output {self.path} has a result of line {number}, and that line now asks "
                    "for something else: another prompt, id or option, also of the command; "
                    "restore it, or give another name"
                )
        return frozenset(hashes)

    def open(self) -> ResultsFile:
        """The file to append to. Raises `ConfigError` or `OSError`."""
        if self.held is None:
            return ResultsFile.new(self.path)
        if self.earlier is None:
            return ResultsFile.replacement(self.path, self.held, b"")
        if len(self.earlier.kept) < self.earlier.size:
            return ResultsFile.replacement(self.path, self.held, self.earlier.kept)
        return ResultsFile.extended(self.path, self.held, self.earlier.size)


@contextmanager
def claimed(
    output: Path | None, source: str | None, overwrite: bool, resume: bool
) -> Iterator[Claim | None]:
    """The claim on the file of --output; None without one. Nothing is written yet.

    source: where the prompts come from, as for `read_lines`. Raises `ConfigError` for a place
    that will not do, or that is taken, `OSError`.
    """
    if output is None:
        if overwrite or resume:
            name = "--overwrite" if overwrite else "--resume"
            raise ConfigError(f"{name} is about the file of --output, which is not given")
        yield None
        return
    if overwrite and resume:
        raise ConfigError("--resume keeps what --overwrite replaces; give one of them")
    # A link to a file stays one.
    path = Path(os.path.realpath(output))
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent} to write --output to")
    if path.exists() and not path.is_dir() and _is_source(path, source):
        raise ConfigError(f"--output {output} is the file of the prompts; give another name")
    held = hold(path)
    try:
        if held is not None and not (overwrite or resume):
            raise ConfigError(
                f"--output {output} exists; give another name, --resume to go on, or --overwrite"
            )
        earlier = None if held is None or not resume else _earlier(held, output)
        yield Claim(path, held, earlier)
    finally:
        if held is not None:
            os.close(held)


def _is_source(path: Path, source: str | None) -> bool:
    try:
        if source is None or source == "-":
            return os.path.samestat(path.stat(), os.fstat(sys.stdin.fileno()))
        return path.samefile(source)
    except (OSError, ValueError):
        # No such file, or a standard input that is none: the reading tells.
        return False


def _earlier(held: int, output: Path) -> Earlier:
    with open(held, "rb", closefd=False) as file:
        data = file.read()
    whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    if not (tail.startswith(_BEGINNING) or _BEGINNING.startswith(tail)):
        raise _no_results(output, whole.count(b"\n") + 1)
    hashes: dict[int, str] = {}
    kept = []
    for place, line in enumerate(whole.splitlines(keepends=True), 1):
        try:
            result = read_json(line)
            number, failure, hashed = result["line"], result["error"], result["input_hash"]
        except (ValueError, LookupError, TypeError) as error:
            raise _no_results(output, place) from error
        if failure is not None:
            continue
        if not isinstance(number, int) or not isinstance(hashed, str):
            raise _no_results(output, place)
        if number in hashes:
            raise ConfigError(
                f"--output {output} has two results of line {number}; remove one of them"
            )
        hashes[number] = hashed
        kept.append(line)
    return Earlier(hashes, b"".join(kept), len(whole))


def _no_results(output: Path, place: int) -> ConfigError:
    return ConfigError(
        f"line {place} of --output {output} is no result of this command, so that it cannot be "
        "resumed; give another name"
    )
