"""`mlx-kvcache chat`: talk with a model over one cache; turns can be undone, cut and forked."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_kvcache.commands.chat_input import Read, on_terminal, reader
from mlx_kvcache.commands.console import USER_ERROR, print_error, print_note
from mlx_kvcache.commands.flags import flag
from mlx_kvcache.commands.loading import load
from mlx_kvcache.commands.options import SequenceOptions, with_flags
from mlx_kvcache.errors import KVCacheError

if TYPE_CHECKING:
    from mlx_kvcache.chat.conversation import Conversation
    from mlx_kvcache.chat.turns import Turn
    from mlx_kvcache.commands.chat_commands import Room


@dataclass(frozen=True)
class ChatFlags(SequenceOptions):
    """Answers in a chat may be longer."""

    max_tokens: Annotated[int, flag("The most tokens of one answer.")] = 512


@with_flags(ChatFlags)
def chat(options: ChatFlags) -> None:
    """Talk with a Hugging Face model over one cache.

    Each message is a turn, and only its new tokens are read. Enter sends it; Alt-Enter begins
    another line of it, and so do the lines of a paste. Messages that start with a slash are
    commands; `/help` lists them: take turns back, answer one anew, fork the conversation, look at
    the cache. Ctrl-C stops an answer, and a second one at the prompt leaves.

    Messages can come from a pipe, one a line. The answers alone go to standard output; everything
    else goes to standard error. From a pipe, the exit status is 2 when a line was refused.

    Examples:

    ```sh
    mlx-kvcache chat
    mlx-kvcache chat --system "Answer in one sentence." --temp 0.7
    mlx-kvcache chat --model gemma3-270m --max-tokens 32
    printf 'Name a river.\\nAnother one.\\n/stats\\n' | mlx-kvcache chat --model org/model
    ```
    """
    from mlx_kvcache.commands.chat_commands import COMMANDS, Room

    with closing(Room(_begin(options))) as room:
        if on_terminal():
            _greet(room, options)
        read = reader({name: command.purpose for name, command in COMMANDS.items()})
        status = _converse(room, read)
    if status:
        raise typer.Exit(status)


def _begin(options: SequenceOptions) -> Conversation:
    from mlx_kvcache.chat.conversation import Conversation
    from mlx_kvcache.chat.turns import ChatOptions

    loaded = load(options)
    cache = loaded.prompt_cache(options)
    conversation = Conversation(
        loaded.decoder(options, cache, _note),
        loaded.tokenizer,
        cache,
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


def _converse(room: Room, read: Read) -> int:
    """Take messages until they end; answers the exit status."""
    refused = interrupted = False
    while True:
        try:
            line = read(f"{room.name}> ")
            if line is None:
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
            _note("Ctrl-C again leaves; so does /quit")
        except (KVCacheError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            refused = True
            print_error(str(error))
    return USER_ERROR if refused and not on_terminal() else 0


def _take(room: Room, line: str) -> bool:
    """Do what a line says, or answer it; False when it says to leave."""
    from mlx_kvcache.commands.chat_commands import run_command

    conversation = room.conversation
    if line.startswith("/") and not line.startswith("//"):
        told = run_command(room, line)
        for each in told.lines:
            _note(each)
        if told.answers:
            _answer(conversation, conversation.retry)
        return not told.leaves
    text = line.removeprefix("/") if line.startswith("//") else line
    _answer(conversation, lambda: conversation.ask(text))
    return True


def _answer(conversation: Conversation, begin: Callable[[], Generator[str, None, None]]) -> None:
    from mlx_kvcache.models.progress import reading_prompt

    before, written = conversation.turns, ""
    pieces = begin()
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
    newest = conversation.turns[-1:]
    begun = bool(newest) and (not before or newest[0] is not before[-1])
    _remark(conversation, newest[0] if begun else None)


def _remark(conversation: Conversation, turn: Turn | None) -> None:
    """Say why an answer ends, unless the model ended it."""
    if turn is None:
        _note("interrupted before the answer began; the conversation stays as it was")
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


def _note(message: str) -> None:
    print_note(message, style="dim")
