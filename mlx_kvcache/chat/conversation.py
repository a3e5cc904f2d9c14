"""A conversation with a model: turns over one cache, which can be undone, cut short and forked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_kvcache.chat.generation import Progress
from mlx_kvcache.chat.stops import StoppingText, before_stop, check_stop_texts
from mlx_kvcache.chat.streaming import answer_text
from mlx_kvcache.chat.text import ChatScript, chat_script, spell
from mlx_kvcache.chat.token_cache import TokenCache, spans
from mlx_kvcache.chat.transcript import Transcript
from mlx_kvcache.chat.turns import ChatOptions, Turn
from mlx_kvcache.control.history import TokenHistory, common_prefix
from mlx_kvcache.errors import CapacityError, ConfigError, RewindError
from mlx_kvcache.facts.checks import is_integer
from mlx_kvcache.integrations.compiled import Model
from mlx_kvcache.integrations.mlx_lm import PromptCache, default_prefill_step
from mlx_kvcache.integrations.sampling import Chooser, RandomState

Notice = Callable[[str], None]


class Conversation:
    """Turns over one cache. Only the new tokens of a turn are fed to the model.

    `history` is the conversation as the model reads it, over the cache. Between turns the cache
    holds all of it, unless it could not go back to where a turn was undone or broken off; then the
    next turn feeds the rest too. What raises has changed nothing.

    cache: an empty `make_prompt_cache(model)`. Raises `ConfigError` for a system prompt or template
    arguments that the model's template does not take.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        cache: PromptCache,
        options: ChatOptions | None = None,
    ) -> None:
        self.options = options = ChatOptions() if options is None else options
        self.tokenizer = tokenizer
        self.on_progress: Progress | None = None
        self.on_notice: Notice | None = None
        self._turns: list[Turn] = []
        self._script = _script_of(tokenizer, options)
        check_stop_texts(options.stop_texts)
        self._chooser = Chooser(options.sampling)
        self._random = RandomState.of(options.sampling.seed)
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
        text = answer_text(self.tokenizer, turn.answer, self._script.stop_tokens)
        return before_stop(text, self.options.stop_texts)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Add a turn; answers the pieces of the model's answer as they are made.

        The turn is checked at once and runs while the iterator is read; close it, or call `stop`,
        to end the answer early. A turn that ends before its answer began is not added.
        Raises `CapacityError` when the turn leaves no room for an answer, `ConfigError` when the
        text or the template gives no tokens.
        """
        self._settle()
        return self._take_turn(text, self._earlier_turns(), self.tokens)

    def retry(self) -> Generator[str, None, None]:
        """Answer the newest turn anew, in the manner of `ask`.

        The answer that is there stays until another has begun. Raises `RewindError` when there is
        no turn, and what `ask` raises.
        """
        self._settle()
        turn = self._newest_turn("answer anew")
        return self._take_turn(turn.user, self._turns[:-1], self.tokens[: turn.start])

    def _take_turn(
        self, text: str, earlier: list[Turn], tokens: list[int]
    ) -> Generator[str, None, None]:
        """The turn `text` after `earlier` ones, which stand as `tokens`; replaces all others."""
        script, prefill = self._script, self.options.prefill
        exchanges = [(turn.user, self.answer_text(turn)) for turn in earlier if turn.answer]
        asked = script.write(exchanges, tokens, text)
        target = script.write(exchanges, tokens, text, prefill) if prefill else asked
        same = common_prefix(self.tokens, target)
        self._check_room(len(target), same)
        start = min([same, *(turn.start for turn in self._turns[len(earlier) :])])
        turns = [
            replace(turn, start=min(turn.start, same), answer_start=min(turn.answer_start, same))
            for turn in earlier
        ]
        places = [turn.start for turn in turns] + [start]
        if self.cached.keeps_places:
            stays = script.stays(exchanges, text, asked)
            places.append(min(max(start, stays), len(target) - 1))
        self._stopping = False
        self._running = self._run(target, places, [*turns, Turn(text, start, len(asked))])
        return self._running

    def stop(self) -> None:
        """End the running answer after its next token. May be called from a signal handler."""
        self._stopping = True

    def undo(self) -> Turn:
        """Take back the newest turn, and answer it.

        Where the cache cannot go back to its start, the next turn reads again what is missing.
        Raises `RewindError` when there is none.
        """
        self._settle()
        turn = self._newest_turn("undo")
        self._shorten(turn.start, self._turns[:-1])
        return turn

    def drop(self, count: int) -> None:
        """Take back the newest `count` tokens, or all if there are fewer.

        Turns that begin among them go. A turn that loses only its tail keeps the rest of its
        answer; one whose whole answer goes no longer counts as said. Raises `RewindError` when
        there is no turn, `ConfigError` for less than one token.
        """
        if not is_integer(count, 1):
            raise ConfigError(f"the number of tokens to drop must be at least 1, got {count!r}")
        self._settle()
        self._newest_turn("undo")
        old = list(self.tokens)
        position = max(0, len(old) - count)
        ends = [*(turn.start for turn in self._turns[1:]), len(old)]
        turns = [
            turn if end <= position else self._cut(turn, old, position)
            for turn, end in zip(self._turns, ends, strict=True)
            if turn.start < position
        ]
        self._shorten(position, turns)

    @property
    def transcript(self) -> Transcript:
        """The conversation as it is now, to be saved."""
        return Transcript(self.options.system, self.turns, list(self.tokens))

    def load(self, saved: Transcript) -> None:
        """Go on from a saved conversation, which the next turn reads.

        Raises `CapacityError` when it leaves no room for an answer, `ConfigError` for a system
        prompt that the model's template does not take.
        """
        self._settle()
        count = len(saved.tokens)
        if count + 1 > self.capacity:
            raise CapacityError(
                f"the saved conversation has {count} tokens and needs 1 position for an answer, "
                f"but the capacity is {self.capacity}{self.options.capacity_source}; use a larger "
                "capacity"
            )
        options = replace(self.options, system=saved.system)
        script = _script_of(self.tokenizer, options)
        tokens, turns = list(saved.tokens), list(saved.turns)
        self.history.make_way(tokens)
        # One statement.
        self.history.tokens, self._turns, self.options, self._script = (
            tokens, turns, options, script,
        )  # fmt: skip

    def reset(self) -> None:
        """Forget all turns; the cache keeps its memory for the next ones."""
        self._settle()
        self._shorten(0, [])

    def fork(self) -> Conversation:
        """A copy that goes its own way; the caches share memory until one of them is written."""
        self._settle()
        twin = copy.copy(self)
        twin._turns = list(self._turns)
        twin._random = self._random.copy()
        twin.cached = self.cached.fork()
        twin.history = self.history.fork(twin.cached)
        return twin

    def close(self) -> None:
        """Take the cache out of the registry. May be repeated."""
        self.cached.close()

    def _run(
        self, target: list[int], places: list[int], turns: list[Turn]
    ) -> Generator[str, None, None]:
        from mlx_lm.generate import wired_limit

        try:
            with wired_limit(self.cached.model):
                self._prefill(target, places, turns)
                if not self._stopping:
                    with self._random.in_use():
                        yield from self._answer(turns)
        finally:
            self._align()

    def _prefill(self, target: list[int], places: list[int], turns: list[Turn]) -> None:
        """Feed all of `target` but its last token, unless stopped."""
        wanted = min(self.history.shared(target), len(target) - 1)
        self._before = self.tokens
        total = len(self.history.continue_as(target))
        done = len(target) - total
        # Going back to where the answer before was asked for is in the order of things.
        if done < min(wanted, max(1, turns[-2].start if turns[1:] else 0)):
            self._notify(
                f"the conversation reads otherwise than before from token {wanted} on, and the "
                f"cache can go back to {done} only; reading {total} tokens from there"
            )
        self.cached.mark(places)
        # A step that ends at such a place leaves there what it takes to come back.
        breaks = places if self.cached.keeps_places else []
        for start, stop in spans(done, len(target) - 1, self._prefill_step, breaks):
            self._report(start - done, total)
            if self._stopping:
                return
            self.cached.feed(target[start:stop])
        self._report(total, total)

    def _answer(self, turns: list[Turn]) -> Iterator[str]:
        budget = min(self.options.max_tokens, self.capacity - len(self.tokens))
        full = "length" if budget == self.options.max_tokens else "capacity"
        text = StoppingText(self.tokenizer, self._script.stop_tokens, self.options.stop_texts)
        end = "interrupted"
        begun = "".join(map(text.add, self.tokens[turns[-1].answer_start :]))
        chooser = self._chooser.after(self.tokens)
        tokens = self.cached.generate(self.tokens[-1], budget, chooser)
        for number, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if number == 1:
                self._turns, self._before, self._answering = turns, None, True
            if token in self._script.stop_tokens:
                end = "stop"
                break
            yield begun + text.add(token)
            begun = ""
            self._random.take()
            if text.stopped_by is not None:
                end = "stop"
                break
            if number == budget:
                end = full
            elif self._stopping:
                break
        self._close_turn(end)
        yield begun + text.finish()

    def _close_turn(self, end: str) -> None:
        turn = self._turns[-1]
        answer = tuple(self.tokens[turn.answer_start :])
        self._turns[-1] = replace(turn, answer=answer, end=end)
        self._answering = False

    def _newest_turn(self, wish: str) -> Turn:
        if not self._turns:
            raise RewindError(f"there is no turn to {wish}; the conversation is empty")
        return self._turns[-1]

    def _shorten(self, position: int, turns: list[Turn]) -> None:
        """Forget the tokens from `position` on, if not the rows before it; `turns` are left."""
        tokens = self.tokens[:position]
        self.history.make_way(tokens)
        # One statement.
        self.history.tokens, self._turns = tokens, turns
        missing = len(self.history.pending)
        if missing:
            self._notify(
                f"the cache can go back to {self.history.held} only; the next turn reads "
                f"{missing} tokens again"
            )

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


def _script_of(tokenizer: Any, options: ChatOptions) -> ChatScript:
    return chat_script(tokenizer, options.system, options.raw, options.template_args)
