"""`mlx-kvcache chat`: talk with a model over one cache; turns can be undone, cut and forked."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_kvcache.commands.chat_input import line_history, on_terminal, read_line
from mlx_kvcache.commands.console import USER_ERROR, print_error, print_note
from mlx_kvcache.commands.flags import flag
from mlx_kvcache.commands.loading import load
from mlx_kvcache.commands.options import SequenceOptions, with_flags
from mlx_kvcache.errors import KVCacheError

if TYPE_CHECKING:
    from mlx_kvcache.chat.conversation import Conversation, Turn
    from mlx_kvcache.commands.chat_commands import Room


@dataclass(frozen=True)
class ChatFlags(SequenceOptions):
    """Answers in a chat may be longer."""

    max_tokens: Annotated[int, flag("The most tokens of one answer.")] = 512


@with_flags(ChatFlags)
def chat(options: ChatFlags) -> None:
    """Talk with a Hugging Face model over one cache.

    Each line is a turn, and only its new tokens are read. Lines that start with a slash are
    commands; `/help` lists them: take turns back, fork the conversation, look at the cache.
    Ctrl-C stops an answer, and a second one at the prompt leaves.

    Lines can come from a pipe. The answers alone go to standard output; everything else goes to
    standard error. From a pipe, the exit status is 2 when a line was refused.

    Examples:

    ```sh
    mlx-kvcache chat
    mlx-kvcache chat --system "Answer in one sentence." --temp 0.7
    mlx-kvcache chat --model gemma3-270m --max-tokens 32
    printf 'Name a river.\\nAnother one.\\n/stats\\n' | mlx-kvcache chat --model org/model
    ```
    """
    from mlx_kvcache.commands.chat_commands import Room

    with closing(Room(_begin(options))) as room:
        if on_terminal():
            _greet(room, options)
        with line_history():
            status = _converse(room)
    if status:
        raise typer.Exit(status)


def _begin(options: SequenceOptions) -> Conversation:
    from mlx_kvcache.chat.conversation import ChatOptions, Conversation

    loaded = load(options)
    conversation = Conversation(
        loaded.model,
        loaded.tokenizer,
        loaded.prompt_cache(options),
        ChatOptions(
            options.system,
            options.raw,
            options.max_tokens,
            loaded.sampling(options),
            options.prefill_step,
            loaded.capacity_source(options),
            options.template_args,
            options.prefill_response or "",
            options.stop_texts,
        ),
    )
    conversation.on_notice = _note
    return conversation


def _greet(room: Room, options: SequenceOptions) -> None:
    from mlx_kvcache.commands.generate_report import cache_line

    _note(f"{options.model}; /help lists the commands")
    _note(cache_line(room.conversation.cached.sequence))


def _converse(room: Room) -> int:
    """Take lines until they end; answers the exit status."""
    refused = interrupted = False
    while True:
        try:
            line = read_line(f"{room.name}> ")
            if line is None:
                sys.stderr.write(_new_line())
                break
            if not line.strip():
                continue
            if not _take(room, line):
                break
            interrupted = False
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            _note(f"{_new_line()}Ctrl-C again leaves; so does /quit")
        except (KVCacheError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            refused = True
            print_error(str(error))
    return USER_ERROR if refused and not on_terminal() else 0


def _take(room: Room, line: str) -> bool:
    """Do what a line says, or answer it; False when it says to leave."""
    from mlx_kvcache.commands.chat_commands import run_command

    if line.startswith("/") and not line.startswith("//"):
        told = run_command(room, line)
        for each in told or ():
            _note(each)
        return told is not None
    _answer(room.conversation, line.removeprefix("/") if line.startswith("//") else line)
    return True


def _answer(conversation: Conversation, text: str) -> None:
    from mlx_kvcache.models.progress import reading_prompt

    before, written = len(conversation.turns), ""
    pieces = conversation.ask(text)
    try:
        with (
            _interrupts(conversation),
            reading_prompt() as conversation.on_progress,
            closing(pieces),
        ):
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
                written = piece or written
    except KeyboardInterrupt:
        pass
    finally:
        conversation.on_progress = None
    if written and not written.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    added = len(conversation.turns) > before
    _remark(conversation, conversation.turns[-1] if added else None)


def _remark(conversation: Conversation, turn: Turn | None) -> None:
    """Say why an answer ends, unless the model ended it."""
    if turn is None:
        _note("interrupted before the answer began; the turn is not part of the conversation")
    elif turn.end == "interrupted":
        _note("interrupted; the answer stays as it is")
    elif turn.end == "length":
        _note(f"the answer was cut at {len(turn.answer)} tokens (--max-tokens)")
    elif turn.end == "capacity":
        _note(
            f"the answer was cut: all {conversation.capacity} positions of the cache are taken"
            f"{conversation.options.capacity_source}; /undo, /reset, or a larger --capacity "
            "make room"
        )


@contextmanager
def _interrupts(conversation: Conversation) -> Iterator[None]:
    """While this is open, the first Ctrl-C ends the answer after its next token.

    A second one breaks into whatever runs, which leaves the conversation whole too.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def stop(_signal: int, _frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        conversation.stop()

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _new_line() -> str:
    """What ends the line of the prompt, where there is one."""
    return "\n" if on_terminal() else ""


def _note(message: str) -> None:
    print_note(message, style="dim")
