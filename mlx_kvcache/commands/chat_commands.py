"""What `/...` lines do in a chat."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_kvcache.chat.conversation import Conversation
from mlx_kvcache.commands.figures import size_text
from mlx_kvcache.commands.generate_report import cache_line, memory_line
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.files import replacing

MAIN = "main"
Lines = list[str]


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

    counts: how many arguments may follow. The action answers what to tell, or None to leave.
    """

    usage: str
    purpose: str
    action: Callable[..., Lines | None]
    counts: tuple[int, ...] = (0,)

    def misused(self) -> ConfigError:
        """What to raise when it is not used as it should be."""
        return ConfigError(f"usage: {self.usage} ({self.purpose})")


def run_command(room: Room, line: str) -> Lines | None:
    """Do what a line that starts with "/" says; answers what to tell, or None to leave.

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


def _reset(room: Room) -> Lines:
    room.conversation.reset()
    return ["the conversation is empty; the cache keeps its memory"]


def _undo(room: Room, count: str | None = None) -> Lines:
    conversation = room.conversation
    if count is None:
        conversation.undo()
    elif count.isdecimal():
        conversation.drop(int(count))
    else:
        raise COMMANDS["/undo"].misused()
    return [f"back to {_extent(conversation)}"]


def _fork(room: Room, name: str) -> Lines:
    if name in room.conversations:
        raise ConfigError(
            f"there is a conversation {name} already; choose another name, or /switch {name}"
        )
    room.conversations[name] = twin = room.conversation.fork()
    return [f"{name} is a copy of {room.name}, {_extent(twin)}; /switch {name} goes there"]


def _switch(room: Room, name: str) -> Lines:
    if name not in room.conversations:
        known = ", ".join(room.conversations)
        raise ConfigError(f"there is no conversation {name}; there are: {known}")
    room.name = name
    return [f"this is {name}, at {_extent(room.conversation)}"]


def _forks(room: Room) -> Lines:
    return [
        f"{'*' if name == room.name else ' '} {name}: {_extent(conversation)}"
        for name, conversation in room.conversations.items()
    ]


def _stats(room: Room) -> Lines:
    conversation = room.conversation
    cached, held = conversation.cached, conversation.history.held
    others = len(room.conversations) - 1
    lines = [
        f"chat    {room.name}: {_extent(conversation)}, {held} of them in the cache; "
        f"{others} other conversation{'' if others == 1 else 's'}",
        cache_line(cached.sequence),
        memory_line(),
    ]
    if cached.states:
        places = ", ".join(str(place) for place in cached.reachable_states())
        size = sum(int(entry.nbytes) for entry in cached.cache.recurrent)
        lines.append(
            f"states  recurrent layers hold {size_text(size)} for each position "
            f"they can go back to: {places}"
        )
    else:
        floor = cached.sequence.rewind_floor
        reach = f"{floor} and up, or 0" if floor else "any"
        lines.append(f"undo    positions that can be reached: {reach}")
    return lines


def _save(room: Room, *arguments: str) -> Lines:
    force = "--force" in arguments
    names = [argument for argument in arguments if argument != "--force"]
    if len(names) != 1 or len(arguments) != 1 + force or not names[0]:
        raise COMMANDS["/save"].misused()
    path = Path(names[0]).expanduser()
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; add --force to overwrite it")
    messages = list(_messages(room.conversation))
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in messages)
    return [f"{len(messages)} message{'' if len(messages) == 1 else 's'} written to {path}"]


def _messages(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """The messages of a conversation; a turn whose answer was undone has none of the assistant."""
    if conversation.options.system is not None:
        yield {"role": "system", "content": conversation.options.system}
    for turn in conversation.turns:
        yield {"role": "user", "content": turn.user}
        if turn.answer:
            yield {
                "role": "assistant",
                "content": conversation.answer_text(turn),
                "finish_reason": turn.end,
                "token_ids": list(turn.answer),
            }


def _help(_room: Room) -> Lines:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.purpose}" for command in COMMANDS.values()]
    return [
        *lines,
        "Ctrl-C stops an answer. A line that starts with // is said with one slash less.",
    ]


def _extent(conversation: Conversation) -> str:
    turns, tokens = len(conversation.turns), len(conversation.tokens)
    return f"{turns} turn{'' if turns == 1 else 's'}, {tokens} token{'' if tokens == 1 else 's'}"


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        Command("/reset", "forget all turns", _reset),
        Command("/undo [N]", "take back the newest turn, or the newest N tokens", _undo, (0, 1)),
        Command(
            "/fork NAME", "copy the conversation under a name, and stay in this one", _fork, (1,)
        ),
        Command("/switch NAME", "go to another conversation", _switch, (1,)),
        Command("/forks", "list the conversations", _forks),
        Command("/stats", "show the cache, the memory and what can be undone", _stats),
        Command("/save FILE [--force]", "write the conversation as JSON lines", _save, (1, 2)),
        Command("/help", "list the commands", _help),
        Command("/quit", "leave; so does Ctrl-D", lambda _: None),
    )
}
