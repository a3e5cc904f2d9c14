"""Messages typed on a terminal: edited, recalled, completed, of one line or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from mlx_kvcache.facts.files import replacing

_HISTORY_ENTRIES = 1000
#: Stands in the file for a line end within a message, so that a message takes one line there.
_LINE_END = "\u2028"


def typed_messages(commands: Mapping[str, str], history: Path) -> Callable[[str], str | None]:
    """What shows a prompt and answers the message typed behind it; None for Ctrl-D.

    commands: what each slash command does, by name. history: the file that keeps messages for
    later chats. Ctrl-C raises `KeyboardInterrupt`.
    """
    session: PromptSession[str] = PromptSession(
        multiline=True,
        prompt_continuation=lambda width, _number, _wrapped: " " * width,
        history=MessageHistory(history),
        completer=CommandCompleter(commands),
        complete_while_typing=False,
        key_bindings=key_bindings(),
        enable_suspend=True,
        output=create_output(always_prefer_tty=True),
    )

    def read(prompt: str) -> str | None:
        try:
            return session.prompt(prompt)
        except EOFError:
            return None

    return read


def key_bindings() -> KeyBindings:
    """Enter sends the message; Alt-Enter, or a backslash before Enter, begins another line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class CommandCompleter(Completer):
    """Completes the name of a slash command at the beginning of a message."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """The commands that begin with what stands before the cursor."""
        del complete_event
        typed = document.text_before_cursor
        for name, purpose in self._commands.items():
            if typed.startswith("/") and name.startswith(typed):
                yield Completion(name, start_position=-len(typed), display_meta=purpose)


class MessageHistory(History):
    """Messages in a file, one a line, newest last.

    It is written anew with each message, whole or not at all, and for its owner only. What keeps
    it from being read or written is no reason to stop a chat.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The messages, newest first."""
        return reversed(self._read())

    def store_string(self, string: str) -> None:
        """Add a message to those that are in the file by now, another chat's among them."""
        entries = [*self._read(), string][-_HISTORY_ENTRIES:]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # What people say is theirs alone.
            with (
                replacing(self._path, mode=0o600, follow=True) as partial,
                partial.open("w", encoding="utf-8", errors="replace", newline="\n") as file,
            ):
                file.writelines(entry.replace("\n", _LINE_END) + "\n" for entry in entries)

    def _read(self) -> list[str]:
        try:
            text = self._path.read_bytes().decode(errors="replace")
        except OSError:
            return []
        return [line.replace(_LINE_END, "\n") for line in text.split("\n") if line]
