"""Stop texts: where an answer ends before the model ends it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mlx_kvcache.chat.streaming import AnswerText
from mlx_kvcache.errors import ConfigError


def check_stop_texts(stops: Iterable[str]) -> tuple[str, ...]:
    """The stop texts. Raises `ConfigError` for one that is empty, or no string."""
    texts = tuple(stops)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"a stop text must be a string that is not empty, got {text!r}")
    return texts


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A whole text up to its first stop text."""
    scanner = StopText(stops)
    return scanner.let_through(text) + scanner.rest()


class StopText:
    """Lets an answer through up to its first stop text, in whatever pieces it comes.

    The first is the one that is whole first; of two that are whole at once, the longer.
    stopped_by: the stop text that was found, None before that.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = check_stop_texts(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def let_through(self, piece: str) -> str:
        """What of the text so far cannot be part of a stop text any more; nothing after one."""
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops]
        found = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if found:
            _, start, self.stopped_by = min(found)
            self._held = ""
            return text[:start]
        keep = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, for an answer that ended with none of them."""
        text, self._held = self._held, ""
        return text


class StoppingText:
    """The text of an answer's tokens as they come, up to its first stop text.

    stop, stop_texts: the tokens and the texts that end the answer; neither is part of it.
    """

    def __init__(
        self, tokenizer: Any, stop: Collection[int] = (), stop_texts: Sequence[str] = ()
    ) -> None:
        self._text = AnswerText(tokenizer, stop)
        self._stops = StopText(stop_texts)

    @property
    def stopped_by(self) -> str | None:
        """The stop text that was found; nothing more is let through then."""
        return self._stops.stopped_by

    def add(self, token: int) -> str:
        """The text that is certain now that `token` follows."""
        return self._stops.let_through(self._text.add(token))

    def finish(self) -> str:
        """The text that was still held back, when nothing follows."""
        return self._stops.let_through(self._text.finish()) + self._stops.rest()


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0
