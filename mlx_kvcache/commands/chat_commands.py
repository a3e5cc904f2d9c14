"""What `/...` lines do in a chat."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from mlx_kvcache.chat.conversation import Conversation
from mlx_kvcache.chat.token_cache import TokenCache
from mlx_kvcache.chat.transcript import messages_of, read_transcript, vocabulary_size
from mlx_kvcache.commands.chat_input import history_path
from mlx_kvcache.commands.figures import size_text
from mlx_kvcache.commands.generate_report import cache_line, memory_line
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import whole_number
from mlx_kvcache.facts.files import expanded, replacing

MAIN = "main"


@dataclass(frozen=True)
class Outcome:
    """What a command says, and whether the newest turn is to be answered now, or the chat left."""

    lines: tuple[str, ...] = ()
    answers: bool = False
    leaves: bool = False


def _told(*lines: str) -> Outcome:
    return Outcome(lines)


class Room:
    """The conversations of a chat, by name, and which of them is being held."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversations = {MAIN: conversation}
        self.name = MAIN

    @property
    def conversation(self) -> Conversation:
        """The one that is being held."""
        return self.conversations[self.name]

    def close(self) -> None:
        """Let all of them go."""
        for conversation in self.conversations.values():
            conversation.close()


@dataclass(frozen=True)
class Command:
    """A command: how it is written, what it does, and its action, given what follows its name.

    counts: how many arguments may follow.
    """

    usage: str
    purpose: str
    action: Callable[..., Outcome]
    counts: tuple[int, ...] = (0,)

    def misused(self) -> ConfigError:
        """What to raise when it is not used as it should be."""
        return ConfigError(f"usage: {self.usage} ({self.purpose})")


def run_command(room: Room, line: str) -> Outcome:
    """Do what a line that starts with "/" says.

    Raises `ConfigError` for a command that does not exist or is not used as it should be, and
    what its action raises; then nothing has changed.
    """
    try:
        name, *arguments = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}; close the quotes") from error
    command = COMMANDS.get(name)
    if command is None:
        raise ConfigError(
            f"there is no command {name}; there are: {', '.join(COMMANDS)}. "
            "To say something that starts with a slash, start it with two"
        )
    if len(arguments) not in command.counts:
        raise command.misused()
    return command.action(room, *arguments)


def _reset(room: Room) -> Outcome:
    room.conversation.reset()
    return _told("the conversation is empty; the cache keeps its memory")


def _undo(room: Room, count: str | None = None) -> Outcome:
    conversation = room.conversation
    dropped = whole_number(count or "")
    if count is None:
        conversation.undo()
    elif dropped is not None:
        conversation.drop(dropped)
    else:
        raise COMMANDS["/undo"].misused()
    return _told(f"back to {_extent(conversation)}")


def _retry(room: Room) -> Outcome:
    conversation = room.conversation
    if not conversation.turns:
        raise ConfigError("there is no turn to answer anew; the conversation is empty")
    greedy = conversation.options.sampling.temp == 0
    note = "sampling is greedy, so the same answer is to be expected; --temp makes others"
    return Outcome((note,) if greedy else (), answers=True)


def _fork(room: Room, name: str) -> Outcome:
    if name in room.conversations:
        raise ConfigError(
            f"there is a conversation {name} already; choose another name, or /switch {name}"
        )
    room.conversations[name] = twin = room.conversation.fork()
    return _told(f"{name} is a copy of {room.name}, {_extent(twin)}; /switch {name} goes there")


def _switch(room: Room, name: str) -> Outcome:
    if name not in room.conversations:
        known = ", ".join(room.conversations)
        raise ConfigError(f"there is no conversation {name}; there are: {known}")
    room.name = name
    return _told(f"this is {name}, at {_extent(room.conversation)}")


def _forks(room: Room) -> Outcome:
    return _told(
        *(
            f"{'*' if name == room.name else ' '} {name}: {_extent(conversation)}"
            for name, conversation in room.conversations.items()
        )
    )


def _stats(room: Room) -> Outcome:
    conversation = room.conversation
    cached, held = conversation.cached, conversation.history.held
    others = len(room.conversations) - 1
    return _told(
        f"chat    {room.name}: {_extent(conversation)}, {held} of them in the cache; "
        f"{others} other conversation{'' if others == 1 else 's'}",
        cache_line(cached.sequence),
        memory_line(),
        _reach(cached),
    )


def _reach(cached: TokenCache) -> str:
    """The positions to which the cache can go back without reading anything again."""
    places = ", ".join(str(place) for place in cached.places())
    if cached.states:
        size = sum(int(entry.nbytes) for entry in cached.cache.recurrent)
        return (
            f"states  recurrent layers hold {size_text(size)} for each position "
            f"they can go back to: {places}"
        )
    floor = cached.sequence.rewind_floor
    if not floor:
        return "undo    positions that can be reached: any"
    size = cached.checkpoints.nbytes
    return (
        f"undo    positions that can be reached: {floor} and up, {places} ({size_text(size)} kept)"
    )


def _save(room: Room, *arguments: str) -> Outcome:
    force = "--force" in arguments
    names = [argument for argument in arguments if argument != "--force"]
    if len(names) != 1 or len(arguments) != 1 + force or not names[0]:
        raise COMMANDS["/save"].misused()
    path = expanded(names[0])
    conversation = room.conversation
    messages = messages_of(conversation.transcript, conversation.answer_text)
    if not messages:
        raise ConfigError("there is nothing to save; the conversation is empty")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; add --force to overwrite it")
    with replacing(path, follow=True) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in messages)
    return _told(f"{len(messages)} message{'' if len(messages) == 1 else 's'} written to {path}")


def _load(room: Room, name: str) -> Outcome:
    if not name:
        raise COMMANDS["/load"].misused()
    conversation, path = room.conversation, expanded(name)
    size = vocabulary_size(conversation.cached.model, conversation.tokenizer)
    saved = read_transcript(path, size, conversation.answer_text)
    conversation.load(saved)
    count = len(conversation.history.pending)
    return _told(f"this is {path}, at {_extent(conversation)}; the next turn reads {count} of them")


def _help(_room: Room) -> Outcome:
    width = max(len(command.usage) for command in COMMANDS.values())
    return _told(
        *(f"{command.usage:<{width}}  {command.purpose}" for command in COMMANDS.values()),
        "Ctrl-C stops an answer. A line that starts with // is said with one slash less.",
        "Alt-Enter, or a backslash before Enter, begins another line of the same message; so do "
        "the lines of a paste.",
        f"What is typed is kept in {history_path()}.",
    )


def _extent(conversation: Conversation) -> str:
    turns, tokens = len(conversation.turns), len(conversation.tokens)
    return f"{turns} turn{'' if turns == 1 else 's'}, {tokens} token{'' if tokens == 1 else 's'}"


def _leave(_room: Room) -> Outcome:
    return Outcome(leaves=True)


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        Command("/reset", "forget all turns", _reset),
        Command("/undo [N]", "take back the newest turn, or the newest N tokens", _undo, (0, 1)),
        Command("/retry", "answer the newest turn anew", _retry),
        Command(
            "/fork NAME", "copy the conversation under a name, and stay in this one", _fork, (1,)
        ),
        Command("/switch NAME", "go to another conversation", _switch, (1,)),
        Command("/forks", "list the conversations", _forks),
        Command("/stats", "show the cache, the memory and what can be undone", _stats),
        Command("/save FILE [--force]", "write the conversation as JSON lines", _save, (1, 2)),
        Command("/load FILE", "go on from what /save wrote", _load, (1,)),
        Command("/help", "list the commands", _help),
        Command("/quit", "leave; so does Ctrl-D", _leave),
        Command("/exit", "the same", _leave),
    )
}
