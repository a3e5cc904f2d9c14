"""A conversation with a model: turns over one cache, which can be undone, cut short and forked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx.nn.layers.base import Module

from mlx_kvcache.chat.generation import Progress
from mlx_kvcache.chat.streaming import AnswerText, answer_text
from mlx_kvcache.chat.text import chat_script, spell
from mlx_kvcache.chat.token_cache import TokenCache
from mlx_kvcache.control.history import TokenHistory, common_prefix
from mlx_kvcache.errors import CapacityError, ConfigError, RewindError
from mlx_kvcache.integrations.mlx_lm import PromptCache, default_prefill_step
from mlx_kvcache.integrations.sampling import Sampling, sampler_of

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Turn:
    """One turn: what was said, and what the model answered.

    start, answer_start: the positions at which the turn's tokens and its answer's begin.
    answer: the answer's tokens, the one that ended it included; empty for a turn whose answer was
        undone. end: why the answer ends: "stop" (the model ended it), "length" (at the most tokens
        of an answer), "capacity" (the cache was full), "interrupted" or "undone" (its tail was).
    """

    user: str
    start: int
    answer_start: int
    answer: tuple[int, ...] = ()
    end: str = "interrupted"


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is held.

    system: the system prompt; raw: leave the chat template out; max_tokens: of one answer;
    prefill_step: tokens of one forward pass over a turn (None: what suits the device);
    capacity_source: where the capacity comes from, for messages.
    """

    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    prefill_step: int | None = None
    capacity_source: str = ""


class Conversation:
    """Turns over one cache. Only the new tokens of a turn are fed to the model.

    `history` is the conversation as the model reads it, over the cache. Between turns the cache
    holds all of it, unless a turn was broken off where the cache could not go back; then the next
    turn feeds the rest too. What raises has changed nothing.

    cache: an empty `make_prompt_cache(model)`. Raises `ConfigError` for a system prompt that the
    model's template does not take.
    """

    def __init__(
        self,
        model: Module,
        tokenizer: Any,
        cache: PromptCache,
        options: ChatOptions | None = None,
    ) -> None:
        self.options = options = ChatOptions() if options is None else options
        self.tokenizer = tokenizer
        self.on_progress: Progress | None = None
        self.on_notice: Notice | None = None
        self._turns: list[Turn] = []
        self._script = chat_script(tokenizer, options.system, options.raw)
        self._sampler = sampler_of(options.sampling)
        self._prefill_step = options.prefill_step or default_prefill_step()
        self._stopping = False
        self._answering = False
        # The tokens before a turn, for as long as its answer has not begun.
        self._before: list[int] | None = None
        self._running: Generator[str, None, None] | None = None
        self.cached = TokenCache(model, cache)
        self.history = TokenHistory(self.cached)

    @property
    def tokens(self) -> list[int]:
        """The conversation as the model reads it."""
        return self.history.tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far, oldest first."""
        return tuple(self._turns)

    @property
    def capacity(self) -> int:
        """The most tokens that the conversation can have."""
        return self.cached.sequence.capacity

    def answer_text(self, turn: Turn) -> str:
        """What the model said in a turn, without the token that ends an answer."""
        return answer_text(self.tokenizer, turn.answer, self._script.stop_tokens)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Add a turn; answers the pieces of the model's answer as they are made.

        The turn is checked at once and runs while the iterator is read; close it, or call `stop`,
        to end the answer early. A turn that ends before its answer began is not added.
        Raises `CapacityError` when the turn leaves no room for an answer, `ConfigError` when the
        text or the template gives no tokens.
        """
        self._settle()
        earlier = self._earlier_turns()
        exchanges = [(turn.user, self.answer_text(turn)) for turn in earlier if turn.answer]
        target = self._script.write(exchanges, self.tokens, text)
        same = common_prefix(self.tokens, target)
        self._check_room(len(target), same)
        start = min([same, *(turn.start for turn in self._turns[len(earlier) :])])
        turns = [
            replace(turn, start=min(turn.start, same), answer_start=min(turn.answer_start, same))
            for turn in earlier
        ]
        self._stopping = False
        self._running = self._run(target, same, [*turns, Turn(text, start, len(target))])
        return self._running

    def stop(self) -> None:
        """End the running answer after its next token. May be called from a signal handler."""
        self._stopping = True

    def undo(self) -> Turn:
        """Take back the newest turn, and answer it.

        Raises `RewindError` when there is none, or when the cache cannot go back to its start.
        """
        self._settle()
        if not self._turns:
            raise RewindError("there is no turn to undo; the conversation is empty")
        turn = self._turns[-1]
        self.history.rewind(turn.start)
        self._turns.pop()
        return turn

    def drop(self, count: int) -> None:
        """Take back the newest `count` tokens, or all if there are fewer.

        Turns that begin among them go. A turn that loses only its tail keeps the rest of its
        answer; one whose whole answer goes no longer counts as said. Raises `RewindError` when
        the cache cannot go back that far, `ConfigError` for less than one token.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"the number of tokens to drop must be at least 1, got {count!r}")
        self._settle()
        old = list(self.tokens)
        position = max(0, len(old) - count)
        self.history.rewind(position)
        ends = [*(turn.start for turn in self._turns[1:]), len(old)]
        self._turns = [
            turn if end <= position else self._cut(turn, old, position)
            for turn, end in zip(self._turns, ends, strict=True)
            if turn.start < position
        ]

    def reset(self) -> None:
        """Forget all turns; the cache keeps its memory for the next ones."""
        self._settle()
        self.history.become([])
        self._turns = []

    def fork(self) -> Conversation:
        """A copy that goes its own way; the caches share memory until one of them is written."""
        self._settle()
        twin = copy.copy(self)
        twin._turns = list(self._turns)
        twin.cached = self.cached.fork()
        twin.history = self.history.fork(twin.cached)
        return twin

    def close(self) -> None:
        """Take the cache out of the registry. May be repeated."""
        self.cached.close()

    def _run(self, target: list[int], same: int, turns: list[Turn]) -> Generator[str, None, None]:
        from mlx_lm.generate import wired_limit

        try:
            with wired_limit(self.cached.model):
                self._prefill(target, same, turns)
                if not self._stopping:
                    yield from self._answer(len(target), turns)
        finally:
            self._align()

    def _prefill(self, target: list[int], same: int, turns: list[Turn]) -> None:
        """Feed all of `target` but its last token, unless stopped."""
        wanted = min(self.history.shared(target), len(target) - 1)
        self._before = self.tokens
        total = len(self.history.continue_as(target))
        done = len(target) - total
        if done < wanted:
            self._notify(
                f"the conversation reads otherwise than before from token {same} on, and the "
                f"cache can go back to {done} only; reading {total} tokens from there"
            )
        starts = [turn.start for turn in turns]
        self.cached.mark(starts)
        # A step that ends where a turn starts leaves a state there to come back to.
        breaks = starts if self.cached.states else []
        for start, stop in spans(done, len(target) - 1, self._prefill_step, breaks):
            self._report(start - done, total)
            if self._stopping:
                return
            self.cached.feed(target[start:stop])
        self._report(total, total)

    def _answer(self, start: int, turns: list[Turn]) -> Iterator[str]:
        budget = min(self.options.max_tokens, self.capacity - start)
        full = "length" if budget == self.options.max_tokens else "capacity"
        text = AnswerText(self.tokenizer, self._script.stop_tokens)
        end = "interrupted"
        tokens = self.cached.generate(self.tokens[-1], budget, self._sampler)
        for number, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if number == 1:
                self._turns, self._before, self._answering = turns, None, True
            if token in self._script.stop_tokens:
                end = "stop"
                break
            yield text.add(token)
            if number == budget:
                end = full
            elif self._stopping:
                break
        self._close_turn(end)
        yield text.finish()

    def _close_turn(self, end: str) -> None:
        turn = self._turns[-1]
        answer = tuple(self.tokens[turn.answer_start :])
        self._turns[-1] = replace(turn, answer=answer, end=end)
        self._answering = False

    def _settle(self) -> None:
        """End an answer that is still running, and make all agree."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
        self._align()

    def _align(self) -> None:
        """Make turns, tokens and cache agree, wherever an answer was broken off."""
        if self._answering:
            self._close_turn("interrupted")
        target = self.tokens if self._before is None else self._before
        wanted = self.history.shared(target)
        self.history.become(target)
        self._before = None
        if self.history.held < wanted:
            self._notify(
                f"the turn was broken off where the cache cannot go back; the next one reads "
                f"{len(self.history.pending)} tokens again"
            )

    def _cut(self, turn: Turn, tokens: Sequence[int], position: int) -> Turn:
        if position > turn.answer_start:
            answer = tuple(tokens[turn.answer_start : position])
            return replace(turn, answer=answer, end="undone")
        user = turn.user
        if position < turn.answer_start and not self._script.renders_history:
            user = spell(self.tokenizer, tokens[turn.start : position])
        return Turn(user, turn.start, position, (), "undone")

    def _earlier_turns(self) -> list[Turn]:
        """The turns before a new one, which replaces those whose answer was undone."""
        turns = list(self._turns)
        while self._script.renders_history and turns and not turns[-1].answer:
            turns.pop()
        return turns

    def _check_room(self, count: int, same: int) -> None:
        if count + 1 > self.capacity:
            raise CapacityError(
                f"the turn needs {count - same} more positions and 1 for an answer, "
                f"{count + 1} with the {same} before, but the capacity is {self.capacity}"
                f"{self.options.capacity_source}; take turns back, start again, or use a larger "
                "capacity"
            )

    def _notify(self, message: str) -> None:
        if self.on_notice is not None:
            self.on_notice(message)

    def _report(self, processed: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(processed, total)


def spans(start: int, stop: int, size: int, breaks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """`start` to `stop` in pieces of at most `size`, none of which goes across a break."""
    ends = sorted({stop, *(place for place in breaks if start < place < stop)})
    for end in ends:
        for first in range(start, end, size):
            yield first, min(first + size, end)
        start = max(start, end)
