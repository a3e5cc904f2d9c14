"""The lines that a person types, or that a pipe brings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from mlx_kvcache.commands.console import decoded, not_utf8
from mlx_kvcache.facts.files import replacing

_HISTORY_LINES = 1000


def on_terminal() -> bool:
    """Whether lines are typed: then there is a prompt."""
    return sys.stdin.isatty()


def read_line(prompt: str) -> str | None:
    """The next line, without its end; None when there is no more.

    The prompt is shown on a terminal only, and never on a standard output that goes elsewhere.
    Raises `ConfigError` for a line that is not UTF-8.
    """
    if not on_terminal():
        return _piped_line()
    if sys.stdout.isatty():
        try:
            return input(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise not_utf8("the line", error) from error
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return _piped_line()


def _piped_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return decoded(line, "the line").removesuffix("\n").removesuffix("\r") if line else None


@contextmanager
def line_history() -> Iterator[None]:
    """While this is open, typed lines can be edited and recalled, those of earlier chats too.

    Without Python's `readline` module, or without a terminal, nothing happens. What keeps the
    history from being read or written is no reason to stop a chat.
    """
    readline = _readline() if on_terminal() else None
    if readline is None:
        yield
        return
    path = history_path()
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY_LINES)
        with suppress(OSError):
            _write_history(readline, path)


def history_path() -> Path:
    """Where typed lines are kept: `$XDG_STATE_HOME`, else `~/.local/state`, `mlx_kvcache/`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "mlx_kvcache" / "chat_history"


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline


def _write_history(readline: ModuleType, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # What people say is theirs alone: the file is made for its owner only.
    with replacing(path, mode=0o600) as partial:
        readline.write_history_file(partial)
