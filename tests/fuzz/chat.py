"""Histories of a conversation: what it says is what a cold run over its tokens says."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.chat.conversation import ChatOptions, Conversation
from mlx_kvcache.errors import CapacityError, RewindError
from mlx_kvcache.models import load
from tests.fuzz.history import History
from tests.support.cold_runs import check_answer, check_cache
from tests.support.tiny_models_on_disk import TEMPLATE, words, write_chat_model

FAMILIES = ("llama", "gemma3_text", "qwen3_next")


@cache
def loaded(family: str, template: str | None) -> tuple[Any, Any]:
    """A tiny model and its tokenizer."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-chat-"))
    atexit.register(shutil.rmtree, directory, True)
    return load(write_chat_model(directory, family, template))


class ChatHistory(History):
    """ask, stop, undo, drop, reset and fork, any of which may be interrupted."""

    kind = "chat"
    turns = 9
    interrupt_chance = 0.3
    thread_chance = 0.0
    compiled_bytes = 256
    must_meet: ClassVar[tuple[str, ...]] = (
        "interrupts", "interrupted ask", "answered", "stopped", "taken out again", "undo", "drop",
        "reset", "fork", "refused", "recurrent", "a ring wrapped",
    )  # fmt: skip

    @classmethod
    def prepare(cls) -> None:
        for family in FAMILIES:
            for template in (TEMPLATE, None):
                model, tokenizer = loaded(family, template)
                talk = Conversation(model, tokenizer, make_prompt_cache(model))
                # Some models keep what their first pass has made.
                list(talk.ask(words(*range(10, 40))))
                talk.close()

    def begin(self) -> None:
        random = self.random
        family, template = random.choice(FAMILIES), random.choice((TEMPLATE, None))
        model, tokenizer = loaded(family, template)
        spare, capacity = random.choice((1, 4, 16, 64)), random.choice((None, None, 60))
        prompt_cache = make_prompt_cache(model, capacity, spare=spare, initial_capacity=4)
        options = ChatOptions(
            max_tokens=random.randint(1, 5), prefill_step=random.choice((3, 8, None))
        )
        self.talk = Conversation(model, tokenizer, prompt_cache, options)
        self.others: list[Conversation] = []
        named = "template" if template else "raw"
        self.told.append(f"{family} {named}, spare {spare}, capacity {capacity}, {options}")
        self.meets("recurrent", bool(self.talk.cached.states))

    def verbs(self) -> Mapping[str, float]:
        verbs = {"ask": 6.0, "reset": 0.3, "fork": 0.8}
        if self.talk.turns:
            verbs |= {"undo": 1.0, "drop": 1.0}
        return verbs

    def check(self) -> None:
        """The cache holds the tokens, or the first of them, and goes on as a cold run over them."""
        talk = self.talk
        sequence = talk.cached.sequence
        self.meets("a ring wrapped", sequence.rewind_floor > 0)
        if talk.turns and talk.turns[-1].answer:
            check_answer(talk)
        is_level = talk.cached.length == len(talk.tokens) == sequence.length
        if is_level and self.chance(0.3):
            check_cache(talk)

    def end(self) -> None:
        """A last turn, and no key is left."""
        self.told.append("the end")
        self.interrupt_chance = 0.0
        for talk in (self.talk, *self.others):
            self.talk = talk
            try:
                self._say(words(5), None)
            except CapacityError:
                self.meets("refused")
            self.check()
            talk.close()

    def ask(self) -> None:
        # The templates refuse some messages that are `w9` alone.
        count = self.random.choice((1, 3, 9, 20))
        text = words(*(self.random.randint(10, 90) for _ in range(count)))
        stop_after = self.random.choice((None, None, None, 0, 1, 2))
        self.tell(text.count(" ") + 1, "words, stop after", stop_after)
        before, turns = list(self.talk.tokens), self.talk.turns
        try:
            is_whole = self.call(lambda: self._say(text, stop_after))
        except CapacityError:
            assert (self.talk.tokens, self.talk.turns) == (before, turns)
            self.meets("refused")
            return
        # A turn may take the place of one whose answer was undone: there are no more than before.
        added = self.talk.turns != turns and self.talk.turns[-1].user == text
        if is_whole and stop_after is None:
            assert added, "a turn that nobody stopped has no answer"
            self.meets("answered")
        elif is_whole:
            self.meets("stopped" if added else "taken out again")
        else:
            self._settled()

    def _say(self, text: str, stop_after: int | None) -> None:
        """A turn, whose answer is stopped after so many pieces."""
        pieces = self.talk.ask(text)
        if stop_after == 0:
            self.talk.stop()
        for number, _ in enumerate(pieces, 1):
            if number == stop_after:
                self.talk.stop()

    def _settled(self) -> None:
        """After an interrupt, the next verb puts right what was left: one that changes nothing."""
        turns = self.talk.turns
        twin = self.talk.fork()
        assert twin.turns[: len(turns)] == self.talk.turns[: len(turns)]
        twin.close()

    def undo(self) -> None:
        before, turns = list(self.talk.tokens), self.talk.turns
        try:
            is_whole = self.call(self.talk.undo)
        except RewindError:
            assert (self.talk.tokens, self.talk.turns) == (before, turns)
            self.meets("refused undo")
            return
        if not is_whole:
            self._settled()
            self._is_one_of(before, before[: turns[-1].start])

    def drop(self) -> None:
        count = self.random.randint(1, 8)
        self.tell(count)
        before, turns = list(self.talk.tokens), self.talk.turns
        try:
            is_whole = self.call(lambda: self.talk.drop(count))
        except RewindError:
            assert (self.talk.tokens, self.talk.turns) == (before, turns)
            self.meets("refused drop")
            return
        after = before[: max(0, len(before) - count)]
        if not is_whole:
            self._settled()
        self._is_one_of(after, after if is_whole else before)

    def reset(self) -> None:
        before = list(self.talk.tokens)
        is_whole = self.call(self.talk.reset)
        if not is_whole:
            self._settled()
        self._is_one_of([], [] if is_whole else before)

    def _is_one_of(self, *possible: list[int]) -> None:
        assert self.talk.tokens in possible, "neither before nor after"

    def fork(self) -> None:
        before, turns = list(self.talk.tokens), self.talk.turns
        forked: list[Conversation] = []
        if self.call(lambda: forked.append(self.talk.fork())):
            assert (forked[0].tokens, forked[0].turns) == (before, turns)
            self.others = [*self.others, self.talk][-2:]
            self.talk = forked[0]
