"""How all commands speak: results to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

import mlx_kvcache
from mlx_kvcache.errors import ConfigError

#: Exit statuses: the system failed us, a wrong request, and what a shell gives for SIGINT and
#: SIGPIPE.
SYSTEM_ERROR = 1
USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Lines(Console):
    """A console that leaves a broken pipe to whoever writes, as any other failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stderr_console() -> Console:
    """The console for progress, figures and errors; lines keep their length in a file or a pipe."""
    return _Lines(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Say what went wrong, in one red line on stderr."""
    line = " ".join(message.split())
    print_note(f"error: {line}", style="bold red")


def print_note(message: str, style: str = "") -> None:
    """One line on stderr. What cannot be written there is lost, and ends nothing."""
    try:
        stderr_console().print(Text(message, style=style))
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def prepare_stdout() -> None:
    """Let stdout take any text: what its encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def decoded(data: bytes, name: str) -> str:
    """What was read as text. Raises `ConfigError`, under `name`, when it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(name, error) from error


def not_utf8(name: str, error: UnicodeDecodeError) -> ConfigError:
    """What to raise for text, known to a person as `name`, that cannot be decoded."""
    return ConfigError(
        f"{name} is not valid UTF-8 ({error.reason} at byte {error.start}); convert it"
    )


def write_json(facts: dict[str, Any]) -> None:
    """One JSON object on stdout, in one line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """The version of this package and of each it stands on, read without importing those."""
    from importlib import metadata

    found = {"mlx-kvcache": mlx_kvcache.__version__}
    for package in ("mlx", "mlx-lm", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def discard_stdout() -> None:
    """Point stdout at nothing, since it cannot be written: the flush at exit would fail again."""
    _discard(sys.stdout)


def _discard(stream: Any) -> None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
