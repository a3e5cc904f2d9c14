"""The messages that a person types, or that a pipe brings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mlx_kvcache.commands.console import decoded
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.files import expanded

#: Answers the next message after a prompt, without its end; None when there is no more.
Read = Callable[[str], str | None]


def on_terminal() -> bool:
    """Whether messages are typed: then there is a prompt."""
    return sys.stdin.isatty()


def reader(commands: Mapping[str, str]) -> Read:
    """What reads one message after the other.

    On a terminal they can be edited and recalled, have several lines, and `commands` (what each
    does, by name) are completed. The prompt never goes to a standard output that is no terminal.
    From a pipe each line is a message. Reading raises `ConfigError` for what is not UTF-8.
    """
    if not on_terminal():
        return _piped_line
    if not (sys.stdout.isatty() or sys.stderr.isatty()):
        return _piped_line
    # Imported where somebody types, since it takes a while.
    from mlx_kvcache.commands.chat_terminal import typed_messages

    read = typed_messages(commands, history_path())

    def message(prompt: str) -> str | None:
        text = read(prompt)
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the line is not valid UTF-8 (at character {error.start}); convert it"
            ) from error
        return text

    return message


def history_path() -> Path:
    """Where what was typed is kept: `$XDG_STATE_HOME`, else `~/.local/state`, `mlx_kvcache/`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expanded(state) / "mlx_kvcache" / "chat_history"


def _piped_line(_prompt: str) -> str | None:
    line = sys.stdin.buffer.readline()
    return decoded(line, "the line").removesuffix("\n").removesuffix("\r") if line else None
