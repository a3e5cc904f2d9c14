"""A conversation as JSON lines, one a message, from which it comes back token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_kvcache.chat.turns import ENDS, Turn
from mlx_kvcache.errors import TranscriptError
from mlx_kvcache.facts.json_text import read_json


@dataclass(frozen=True)
class Transcript:
    """A saved conversation: its system prompt, its turns, and the tokens as the model reads it."""

    system: str | None
    turns: tuple[Turn, ...]
    tokens: list[int]


def messages_of(saved: Transcript, answer_text: Callable[[Turn], str]) -> list[dict[str, Any]]:
    """The messages, each with its role, content and tokens, for a line of JSON each.

    A turn whose answer was undone has none of the assistant. An answer that the template writes
    otherwise by now has as `kept_token_ids` what the model still reads of it. The first message
    tells how many there are.
    """
    messages: list[dict[str, Any]] = []
    if saved.system is not None:
        messages.append({"role": "system", "content": saved.system})
    ends = [*(turn.start for turn in saved.turns[1:]), len(saved.tokens)]
    for turn, end in zip(saved.turns, ends, strict=bool(saved.turns)):
        said = saved.tokens[turn.start : turn.answer_start]
        messages.append({"role": "user", "content": turn.user, "token_ids": said})
        if turn.answer:
            answer, kept = list(turn.answer), saved.tokens[turn.answer_start : end]
            message = {
                "role": "assistant",
                "content": answer_text(turn),
                "finish_reason": turn.end,
                "token_ids": answer,
            }
            messages.append(message if kept == answer else {**message, "kept_token_ids": kept})
    if messages:
        messages[0]["messages"] = len(messages)
    return messages


def read_transcript(path: Path, vocabulary: int, answer_text: Callable[[Turn], str]) -> Transcript:
    """What `messages_of` made, one a line, read and checked as a whole.

    vocabulary: the number of token ids; answer_text: what the model's tokenizer makes of an
    answer. Raises `TranscriptError`, naming the line, for a file that is cut short, damaged, not a
    saved conversation or one of another model, and `OSError`.
    """
    return _Reader(path, vocabulary, answer_text).read()


def vocabulary_size(model: Any, tokenizer: Any) -> int:
    """The number of token ids; a model may have more than its tokenizer names."""
    facts = getattr(model, "args", None)
    text = getattr(facts, "text_config", None)
    inner = text.get("vocab_size") if isinstance(text, dict) else None
    sizes = (getattr(facts, "vocab_size", None), inner)
    return max(len(tokenizer), *(size for size in sizes if isinstance(size, int)), 0)


class _Reader:
    def __init__(self, path: Path, vocabulary: int, answer_text: Callable[[Turn], str]) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._answer_text = answer_text
        self._line = 0

    def read(self) -> Transcript:
        messages = list(self._messages())
        if not messages:
            raise TranscriptError(f"{self._path} is empty; it holds no saved conversation")
        self._line = 1
        count = messages[0].get("messages")
        if type(count) is not int:
            self._refuse("does not say how many messages there are, as the first of them does")
        self._line = len(messages)
        if count != len(messages):
            self._refuse(f"is the last, but the first says that there are {count}")
        self._line = 0
        system: str | None = None
        turns: list[Turn] = []
        tokens: list[int] = []
        for message in messages:
            self._line += 1
            role = message.get("role")
            if role == "system" and self._line == 1:
                system = self._text(message)
            elif role == "user":
                start = len(tokens)
                tokens += self._ids(message, "token_ids")
                turns.append(Turn(self._text(message), start, len(tokens), (), "undone"))
            elif role == "assistant" and turns and not turns[-1].answer:
                turns[-1] = self._answered(turns[-1], message)
                kept = "kept_token_ids" if "kept_token_ids" in message else "token_ids"
                tokens += self._ids(message, kept)
            else:
                self._refuse(f"is a message of {role!r}, which cannot stand there")
        return Transcript(system, tuple(turns), tokens)

    def _messages(self) -> Iterator[dict[str, Any]]:
        for data in self._path.read_bytes().splitlines(keepends=True):
            self._line += 1
            if not data.endswith(b"\n"):
                self._refuse("has no end; the file is cut short")
            try:
                message = read_json(data)
            except ValueError:
                self._refuse("is not JSON; the file is damaged, or no saved conversation")
            if not isinstance(message, dict):
                self._refuse("is not a message; the file is no saved conversation")
            yield message

    def _answered(self, turn: Turn, message: dict[str, Any]) -> Turn:
        end = message.get("finish_reason")
        if end not in ENDS:
            self._refuse(f"has the finish_reason {end!r}, which is none of {', '.join(ENDS)}")
        answer = tuple(self._ids(message, "token_ids"))
        if not answer:
            self._refuse("has no token_ids")
        answered = Turn(turn.user, turn.start, turn.answer_start, answer, end)
        if self._answer_text(answered) != self._text(message):
            self._refuse(
                "has a content that its token_ids do not spell here; it was saved with another "
                "model, or changed"
            )
        return answered

    def _text(self, message: dict[str, Any]) -> str:
        content = message.get("content")
        if not isinstance(content, str):
            self._refuse("has no content; the file is no saved conversation")
        return content

    def _ids(self, message: dict[str, Any], name: str) -> Sequence[int]:
        ids = message.get(name)
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            self._refuse(f"has no {name}; the file is no saved conversation of this program")
        for each in ids:
            if not 0 <= each < self._vocabulary:
                self._refuse(
                    f"has the token {each} in its {name}, but the model has "
                    f"{self._vocabulary}; it was saved with another model"
                )
        return ids

    def _refuse(self, reason: str) -> NoReturn:
        raise TranscriptError(f"line {self._line} of {self._path} {reason}")
