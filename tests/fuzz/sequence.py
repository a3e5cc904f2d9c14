"""Histories of one sequence: every verb of `MLXSequenceCache`, against the rows by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mlx.core as mx
import pytest

from mlx_kvcache.errors import CapacityError
from tests.fuzz.history import History
from tests.support.sequence_oracle import DTYPES, FORMS, Question, Shape, observe
from tests.support.sequence_verbs import LongSession, Moment

WINDOWS = (0, 0, 1, 2, 3, 5, 8)


class SequenceHistory(History):
    """Layers of any windows; one start form, or both side by side and never interrupted."""

    kind = "sequence"
    turns = 18
    must_meet: ClassVar[tuple[str, ...]] = (
        "interrupts", "a ring wrapped", "refused rewind", "rewind past a wrap", "torn",
        "step finished later", "step taken back", "clear was all that was left", "restore",
        "fork_at", "copy", "reserve", "in a thread", "interrupted restore", "interrupted step",
        "interrupted rewind", "interrupted reserve", "went on unmended", "refused unmended",
        "batch", "several KV heads", "shared KV", "window 1", "spare 1", "stored as another dtype",
    )  # fmt: skip

    def begin(self) -> None:
        random = self.random
        shapes = [
            Shape(
                random.choice(WINDOWS),
                random.choice((1, 1, 2)),
                random.randint(1, 3),
                random.choice((0, 1, 2, 2)),
                random.random() < 0.3,
            )
            for _ in range(random.randint(1, 3))
        ]
        forms = FORMS if random.random() < 0.25 else (random.choice(FORMS),)
        if len(forms) > 1:
            self.interrupt_chance = 0.0
        self.session = LongSession(
            shapes,
            batch=random.choice((1, 1, 1, 2, 3)),
            capacity=random.choice((7, 20, 33, 100, 1000)),
            spare=random.choice((1, 1, 2, 3, 4, 6)),
            initial_capacity=random.choice((0, 1, 3, 4, 10, 512)),
            kv_dtype=random.choice((None, None, None, *DTYPES)),
            forms=forms,
            seed=self.seed,
        )
        self.moments: list[Moment] = []
        self.made()
        session = self.session
        self.tell_begin(session)

    def made(self) -> None:
        """The session was made."""

    def tell_begin(self, session: LongSession) -> None:
        config = session.config
        windows = [shape.window for shape in session.shapes]
        self.told.append(
            f"windows {windows}, batch {session.batch}, {config}, {len(session.caches)} forms"
        )
        self.meets("batch", session.batch > 1)
        self.meets("several KV heads", any(shape.kv_heads > 1 for shape in session.shapes))
        self.meets("shared KV", any(shape.shared for shape in session.shapes))
        self.meets("window 1", 1 in windows)
        self.meets("spare 1", config.spare == 1)
        self.meets("stored as another dtype", config.kv_dtype in ("float16", "bfloat16"))

    def verbs(self) -> Mapping[str, float]:
        session = self.session
        verbs = {
            "rewind": 3.0, "clear": 0.4, "take_snapshot": 1.0, "fork_at": 0.7, "copy": 0.5,
            "reserve": 0.6, "beyond_capacity": 0.3,
        }  # fmt: skip
        if session.room:
            verbs |= {"step": 6.0, "decode": 5.0}
            if len(session.shapes) > 1:
                verbs["torn"] = 1.0
        if self.moments:
            verbs["restore"] = 1.2
        if len(set(session.dtypes)) == 1:
            verbs["change_dtypes"] = 0.4
        return verbs

    def check(self) -> None:
        session = self.session
        session.flush()
        session.stands_at(session.length)
        wrapped = any(0 < session.ring_size(n) < session.high_water for n in session.layers)
        self.meets("a ring wrapped", wrapped)

    def settle_thread(self) -> None:
        self.session.compute()
        mx.eval([cache.state for cache in self.session.caches])

    def questions(self) -> list[Question | None]:
        """Each policy asks for nothing, for one mask that is shared, or for each layer's own."""
        windows = [shape.window for shape in self.session.shapes]
        modes = {
            window: self.random.choice(("none", "first", "first", "each")) for window in windows
        }
        shared = {window: self._question() for window in windows}
        questions: list[Question | None] = []
        for layer, window in enumerate(windows):
            mode, is_first = modes[window], windows.index(window) == layer
            if mode == "each":
                questions.append(self._question())
            else:
                questions.append(shared[window] if mode == "first" and is_first else None)
        return questions

    def _question(self) -> Question:
        random = self.random
        decoys = (random.randint(1, 4),) if random.random() < 0.15 else ()
        window = random.choice((None, None, None, 1, 2, 4, 7, 30))
        return Question(window, random.random() < 0.3, decoys)

    def _count(self) -> int:
        largest = max((self.session.ring_size(n) for n in self.session.layers), default=0)
        count = self.random.choice((1, 1, 2, 3, 4, 6, largest + 1, 2 * largest + 2))
        return min(count, self.session.room)

    def step(self) -> None:
        session, count = self.session, self._count()
        order = None
        if self.chance(0.1):
            order = self.random.sample(session.layers, len(session.layers))
        reserve = None
        if self.chance(0.05):
            length = self.random.randint(0, min(session.config.capacity, 60))
            reserve = self.random.randrange(len(session.shapes)), length
        self.tell(count, order or "", reserve or "")
        self._step(count, self.questions(), order, reserve)
        if self.chance(0.3):
            session.hold()

    def decode(self) -> None:
        questions, times = self.questions(), self.random.randint(1, 8)
        self.tell(times)
        for _ in range(min(times, self.session.room)):
            if not self._step(1, questions):
                return

    def _step(self, count: int, questions: list[Question | None], *choices: object) -> bool:
        """One step of all layers; whether it was not interrupted."""
        session = self.session
        start, high_water = session.length, session.high_water
        if self.call(lambda: self.write(count, questions, *choices)):
            return True
        lag = session.after_interrupted_step(start, count, high_water)
        self.mend_step(start, count, lag)
        return False

    def write(self, count: int, questions: list[Question | None], *choices: object) -> None:
        self.session.step(count, questions, *choices)

    def mend_step(self, start: int, count: int, lag: list[int]) -> None:
        """After a step that some layers lack: finish it, or take it back."""
        session = self.session
        is_torn = session.cache.layout.unwritten > 0
        if is_torn and self.chance(0.5):
            session.refuses_another_step(start, count)
        if not lag and self.chance(0.5):
            self.meets("step was whole")
        elif is_torn and not self.was_in_thread and self.chance(0.4):
            session.finish_step(count, lag)
            self.meets("step finished later")
        elif session.can_rewind(start):
            assert session.rewind(start)
            self.meets("step taken back")
        else:
            assert not session.rewind(start)
            session.clear()
            self.meets("clear was all that was left")

    def torn(self) -> None:
        """Some layers are never called."""
        session, count = self.session, self._count()
        start = session.length
        written = self.random.sample(
            session.layers, self.random.randint(1, len(session.layers) - 1)
        )
        self.tell(count, written)
        session.step(count, self.questions(), written)
        self.mend_step(start, count, [n for n in session.layers if n not in written])

    def rewind(self) -> None:
        session, length = self.session, self.session.length
        lowest = max(0, length - 8) if self.chance(0.9) else 0
        position = self.random.randint(lowest, length)
        one_by_one = None
        if self.chance(0.4):
            one_by_one = self.random.sample(session.layers, len(session.layers))
        self.tell(position, one_by_one or "")
        is_possible = session.can_rewind(position)
        self.meets("refused rewind", not is_possible)
        self.meets("rewind past a wrap", is_possible and 0 < session.floor() <= position < length)
        if not self.call(lambda: session.rewind(position, one_by_one)):
            self._mend_rewind(position, length, is_possible)

    def _mend_rewind(self, position: int, length: int, is_possible: bool) -> None:
        session = self.session
        if not is_possible:
            session.stands_at(length)
        elif session.cache.length == length and self._goes_on(1):
            return
        else:
            session.after_interrupted_rewind(position, length)

    def _goes_on(self, steps: int) -> bool:
        """Try to go on without putting anything right; whether nothing had to be."""
        if not self.chance(0.5) or not self.session.room:
            return False
        went_on = self.session.goes_on_only_if_whole(steps)
        self.meets("went on unmended" if went_on else "refused unmended")
        if went_on:
            self.tell("[went on]")
        return went_on

    def clear(self) -> None:
        session = self.session
        if not self.call(session.clear):
            self.clear_torn()
        session.batch = self.random.choice((1, 1, 2, 3))
        if self.chance(0.3):
            session.dtypes = [self._dtypes() for _ in session.shapes]

    def change_dtypes(self) -> None:
        self.session.dtypes = [self._dtypes()] * len(self.session.shapes)
        self.tell(*self.session.dtypes[0])

    def _dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        floats = list(DTYPES.values())
        return self.random.choice(floats), self.random.choice(floats)

    def take_snapshot(self) -> None:
        if self.call(lambda: self.moments.append(self.session.take_snapshot())):
            self.moments = self.moments[-3:]

    def restore(self) -> None:
        session, moment = self.session, self.random.choice(self.moments)
        self.tell(len(moment.rows[0]), "from", session.length)
        if self.call(lambda: self.go_back(moment)):
            return
        if session.is_at_rest():
            # Begun not at all, or done already.
            session.holds_one_of(session.moment([]), moment)
            self.meets("went on unmended")
            return
        self.refuses_steps()
        self.mend_restore(moment)

    def refuses_steps(self) -> None:
        """Nothing takes a step as long as it is not put right."""
        for layer in self.session.layers:
            self.session.refuses(layer, self.random.randint(1, 3))
        self.meets("refused unmended")

    def mend_restore(self, moment: Moment) -> None:
        """Restore again what was interrupted, or clear it."""
        if self.chance(0.6):
            self.session.pending.clear()
            self.go_back(moment)
        else:
            self.clear_torn()

    def go_back(self, moment: Moment) -> None:
        session = self.session
        for cache, snapshot in zip(session.caches, moment.snapshots, strict=True):
            cache.restore(snapshot)
        session.hold_moment(moment)

    def clear_torn(self) -> None:
        """Clear what is not whole, so that no check of the rows can come before."""
        self.session.pending.clear()
        self.session.cache.clear()
        self.session._forget(0)

    def fork_at(self) -> None:
        session = self.session
        position = self.random.randint(max(0, session.length - 6), session.length)
        self.tell(position)
        self._unharmed(lambda: session.fork_at(position))

    def copy(self) -> None:
        self._unharmed(self.session.fork)

    def _unharmed(self, verb: object) -> None:
        """A verb that leaves the cache as it is, interrupted or not."""
        before = [observe(cache) for cache in self.session.caches]
        caches = self.session.caches
        if not self.call(verb):
            assert [observe(cache) for cache in caches] == before

    def reserve(self) -> None:
        session = self.session
        length = self.random.randint(0, min(session.config.capacity, 80))
        self.tell(length)
        self.call(lambda: session.reserve(length))

    def beyond_capacity(self) -> None:
        session = self.session
        if session.room > 200:
            return
        session.flush()
        layer = self.random.choice(session.layers)
        keys, values = map(mx.array, session.rows(layer, session.room + 1))
        for cache in session.caches:
            before = observe(cache)
            with pytest.raises(CapacityError):
                cache.layer(layer).update_and_fetch(keys, values)
            with pytest.raises(CapacityError):
                cache.reserve(session.config.capacity + 1)
            assert observe(cache) == before
