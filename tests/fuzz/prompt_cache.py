"""Histories of a prompt cache as mlx-lm uses it, with recurrent states beside the layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    can_trim_prompt_cache,
    trim_prompt_cache,
)

from mlx_kvcache.errors import RewindError
from mlx_kvcache.integrations.mlx_lm import PromptCache
from tests.fuzz.sequence import SequenceHistory
from tests.support.arrays import raw
from tests.support.sequence_oracle import Question, observe
from tests.support.sequence_verbs import Moment

#: Arrays in the state of a recurrent layer.
STATES = 2


class PromptMoment(NamedTuple):
    """What the whole prompt cache held: its rows, and its recurrent states."""

    rows: Moment
    states: list[Any]


class PromptCacheHistory(SequenceHistory):
    """A sequence's verbs, through the list that mlx-lm takes."""

    kind = "prompt_cache"
    must_meet: ClassVar[tuple[str, ...]] = (
        "interrupts", "a ring wrapped", "recurrent", "no recurrent", "restore", "fork_at", "copy",
        "trimmed", "trim refused", "interrupted restore", "interrupted step", "step taken back",
        "interrupted rewind", "interrupted copy", "recurrent rewind refused",
    )  # fmt: skip

    def made(self) -> None:
        """Put the layers into a list, some with a recurrent layer beside them."""
        session, random = self.session, self.random
        session.caches = session.caches[:1]
        self.interrupt_chance = 0.15
        entries: list[Any] = []
        for layer in session.cache.layers:
            beside = random.choice(("nothing", "nothing", "before", "within"))
            if beside == "before":
                entries.append(ArraysCache(STATES))
            entries.append(CacheList(layer, ArraysCache(STATES)) if beside == "within" else layer)
        self.prompt = PromptCache(entries, session.cache)
        self.written = 0
        self.meets("recurrent" if self.prompt.recurrent else "no recurrent")
        self.states = self._held()

    def _held(self) -> list[Any]:
        """The bytes of the recurrent states."""
        return [[raw(array) for array in entry.cache] for entry in self.prompt.recurrent]

    def check(self) -> None:
        assert self.prompt.sequence is self.session.cache
        assert self.prompt.length == self.session.length
        assert self._held() == self.states, "another recurrent state"
        super().check()

    def verbs(self) -> Mapping[str, float]:
        return {**super().verbs(), "trim": 1.5}

    def write(self, count: int, questions: list[Question | None], *choices: object) -> None:
        """A step, with which the recurrent layers go on too, as a model's forward pass does."""
        super().write(count, questions, *choices)
        self.written += 1
        for number, entry in enumerate(self.prompt.recurrent):
            for place in range(STATES):
                drawn = np.random.default_rng([self.seed, self.written, number, place])
                entry[place] = mx.array(drawn.standard_normal((1, 2)).astype(np.float32))
        self.states = self._held()

    def mend_step(self, start: int, count: int, lag: list[int]) -> None:
        """As for the layers alone; the recurrent ones hold what they held before or after."""
        super().mend_step(start, count, lag)
        self.states = self._held()

    def rewind(self) -> None:
        if not self.prompt.recurrent:
            super().rewind()
            return
        session, length = self.session, self.session.length
        position = self.random.randint(max(0, length - 4), length)
        self.tell(position)
        before = observe(session.cache)
        if position == length:
            self.call(lambda: self.prompt.rewind(position))
            self.prompt.rewind(position)
            return
        try:
            assert not self.call(lambda: self.prompt.rewind(position))
        except RewindError:
            self.meets("recurrent rewind refused")
        assert observe(session.cache) == before

    def trim(self) -> None:
        """By mlx-lm's function, which asks every layer before it trims any."""
        session, length = self.session, self.session.length
        count = self.random.randint(0, min(6, length))
        position = length - count
        self.tell(count)
        before = observe(session.cache)
        is_possible = session.can_rewind(position) and not self.prompt.recurrent
        trimmed: list[int] = []
        try:
            if not self.call(lambda: trimmed.append(trim_prompt_cache(self.prompt, count))):
                if is_possible:
                    session.after_interrupted_rewind(position, length)
                else:
                    assert observe(session.cache) == before
                return
        except RewindError:
            assert not session.can_rewind(position)
            assert observe(session.cache) == before
            self.meets("trim refused")
            return
        if is_possible:
            assert trimmed == [count]
            session._forget(position)
            self.meets("trimmed", count > 0)
        else:
            # Of a recurrent layer mlx-lm says itself that it cannot be trimmed.
            assert trimmed == [0]
            assert self.prompt.recurrent
            assert not can_trim_prompt_cache(self.prompt)
            assert observe(session.cache) == before

    def take_snapshot(self) -> None:
        def take() -> None:
            self.session.flush()
            moment = self.session.moment([self.prompt.snapshot()])
            self.moments.append(PromptMoment(moment, self.states))  # type: ignore[arg-type]

        self.call(take)
        self.moments = self.moments[-3:]

    def restore(self) -> None:
        moment: Any = self.random.choice(self.moments)
        self.tell(len(moment.rows.rows[0]), "from", self.session.length)
        session = self.session
        if self.call(lambda: self.go_back(moment)):
            return
        if session.is_at_rest():
            # Rows and states of one moment, or the other.
            session.holds_one_of(session.moment([]), moment.rows)
            if self._held() != self.states:
                session.hold_moment(moment.rows)
                assert session.holds_rows()
                self.states = moment.states
            self.meets("went on unmended")
        else:
            self.refuses_steps()
            session.pending.clear()
            self.go_back(moment)

    def go_back(self, moment: Any) -> None:
        self.prompt.restore(moment.rows.snapshots[0])
        self.session.hold_moment(moment.rows)
        self.states = moment.states

    def clear(self) -> None:
        """Of recurrent layers nothing can be cleared."""
        if not self.prompt.recurrent:
            super().clear()

    def fork_at(self) -> None:
        session = self.session
        position = self.random.randint(max(0, session.length - 6), session.length)
        if self.prompt.recurrent:
            position = session.length
        self.tell(position)
        original, before = self.prompt, observe(session.cache)
        twins: list[PromptCache] = []
        try:
            whole = self.call(lambda: twins.append(original.fork(position)))
        except RewindError:
            assert not session.can_rewind(position)
            whole = False
        assert observe(session.cache) == before
        assert self._held() == self.states
        if whole:
            self._go_on_with(twins[0], position)

    def copy(self) -> None:
        """As mlx-lm's own prompt cache copies what it keeps."""
        before = observe(self.session.cache)
        twins: list[PromptCache] = []
        whole = self.call(lambda: twins.append(copy.deepcopy(self.prompt)))
        assert observe(self.session.cache) == before
        assert self._held() == self.states
        if whole:
            self._go_on_with(twins[0], self.session.length)

    def _go_on_with(self, twin: PromptCache, position: int) -> None:
        session = self.session
        session.flush()
        session.left_behind = [(session.cache, observe(session.cache))]
        session.caches, self.prompt = [twin.sequence], twin
        session._forget(position)

    def settle_thread(self) -> None:
        super().settle_thread()
        mx.eval([entry.state for entry in self.prompt.recurrent])
