"""Histories of an engine: requests, sessions and forks; each answer is that of its prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_kvcache.engine import Engine, Request, Session
from mlx_kvcache.errors import CapacityError, KVCacheError, RewindError
from tests.fuzz.history import History
from tests.support.engine_runs import KINDS, alone
from tests.support.tiny_models import all_families, build

#: The most tokens of an answer.
LONGEST = 8
#: The answer at a pinned length, for what was asked before it.
_ANSWERS: dict[tuple[int, ...], list[int]] = {}


@cache
def two_layers() -> nn.Module:
    """A ring and a flat layer: what goes wrong, goes wrong in two layers as it does in more."""
    config = {**all_families()["llama"], "num_hidden_layers": 2}
    return build("llama", {**config, "layer_types": ["sliding_attention", "full_attention"]})


def answer_after(tokens: tuple[int, ...]) -> list[int]:
    """What follows these tokens, by mlx-lm's loop on a cache of one sequence."""
    if tokens not in _ANSWERS:
        if len(_ANSWERS) > 5000:
            _ANSWERS.clear()
        _ANSWERS[tokens] = alone(two_layers(), tokens, LONGEST)
    return _ANSWERS[tokens]


@dataclass(eq=False)
class Asked:
    """A request, and the tokens of its session or parent when it was submitted."""

    request: Request
    prompt: list[int]
    count: int
    is_checked: bool = False


@dataclass(eq=False)
class Talk:
    """A session, and the tokens that it should hold."""

    session: Session
    tokens: list[int] = field(default_factory=list)
    asked: Asked | None = None


class EngineHistory(History):
    """submit, step, cancel, open, fork, close and compact, any of which may be interrupted."""

    kind = "engine"
    turns = 24
    thread_chance = 0.0
    compiled_bytes = 256
    must_meet: ClassVar[tuple[str, ...]] = (
        "interrupts", "interrupted advance", "interrupted submit", "answer", "answer of a session",
        "answer of a fork", "cancelled", "fork", "close", "compact", "cell", "batched",
    )  # fmt: skip

    @classmethod
    def prepare(cls) -> None:
        two_layers()

    def begin(self) -> None:
        random = self.random
        kind = random.choice(KINDS)
        choices = {
            "capacity": random.choice((50, 90, 160)),
            "max_active": (active := random.randint(1, 5)),
            "step_tokens": random.choice((active, 5, 8, 24)),
            "spare": random.choice((1, 2, 8, 64)),
            "initial_capacity": random.choice((0, 4, 16)),
        }
        choices["step_tokens"] = max(active, choices["step_tokens"])
        self.engine = Engine(two_layers(), kind=kind, **choices)
        self.initial_capacity = choices["initial_capacity"]
        self.told.append(f"{kind} {choices}")
        self.meets(kind)
        self.asked: list[Asked] = []
        self.talks: list[Talk] = []

    def verbs(self) -> Mapping[str, float]:
        verbs = {"submit": 3.0, "advance": 7.0, "compact": 0.3}
        if len(self.talks) < 3:
            verbs["open"] = 1.0
        if self.talks:
            verbs |= {"fork": 1.0, "close": 0.4}
        if any(each.request.finish_reason is None for each in self.asked):
            verbs["cancel"] = 0.6
        return verbs

    def check(self) -> None:
        for each in self.asked:
            self._check_request(each)
        for talk in self.talks:
            self._check_talk(talk)

    def _check_request(self, each: Asked) -> None:
        request = each.request
        if each.is_checked:
            return
        tokens = request.tokens
        if request.session is not None and request.begin:
            before = request.session.tokens[: request.begin]
            assert before[len(before) - len(each.prompt) :] == each.prompt, "another prompt"
            assert tokens == answer_after(tuple(before))[: len(tokens)], "other tokens than alone"
        else:
            assert not tokens
        if request.finish_reason is None:
            return
        each.is_checked = True
        if request.finish_reason == "length":
            assert len(tokens) == each.count
            self.meets("answer")
            self.meets("answer of a session", not request.owns_session)
            self.meets("answer of a fork", request.parent is not None)
        else:
            assert request.finish_reason in ("cancelled", "failed")
            # A parent that was closed or has grown since is all that may fail here.
            if request.finish_reason == "failed":
                assert isinstance(request.error, KVCacheError), request.error
            self.meets(request.finish_reason)

    def _check_talk(self, talk: Talk) -> None:
        held = talk.session.tokens
        asked = talk.asked
        if asked is None:
            assert held == talk.tokens
            return
        request = asked.request
        whole = [*talk.tokens, *asked.prompt, *request.tokens]
        assert held in (talk.tokens, whole) if not request.tokens else held == whole
        if request.finish_reason is not None:
            talk.tokens, talk.asked = list(held), None

    def end(self) -> None:
        """All requests end, and nothing is left of them."""
        engine = self.engine
        self.told.append("the end")
        for talk in self.talks:
            if talk.asked is None:
                engine.close(talk.session)
        self._run_out()
        self.check()
        assert all(each.request.finish_reason for each in self.asked)
        for talk in self.talks:
            engine.close(talk.session)
        # The next verb takes away what an interrupted one has left.
        engine.compact()
        assert (engine.cache.used, engine.cache.sequences) == (0, ())
        # Cells may keep the rows that they started with.
        assert engine.cache.nbytes == 0 or self.initial_capacity
        engine.shutdown()

    def _run_out(self) -> None:
        engine = self.engine
        while not engine.is_idle:
            try:
                engine.step()
            except CapacityError:
                # What sessions hold that nobody closes: here they give way.
                engine.cancel(engine.waiting[0])

    def prompt(self) -> list[int]:
        start, length = self.random.randrange(6), self.random.choice((1, 2, 3, 5, 9, 14))
        return [3 + (7 * start + 5 * place) % 90 for place in range(length)]

    def submit(self) -> None:
        prompt, count = self.prompt(), self.random.randint(0, LONGEST)
        talk: Talk | None = None
        parent: Session | None = None
        idle = [talk for talk in self.talks if talk.asked is None]
        if idle and self.chance(0.4):
            talk = self.random.choice(idle)
        elif self.talks and self.chance(0.3):
            parent = self.random.choice(self.talks).session
        self.tell(len(prompt), count, "in a session" if talk else "", "forked" if parent else "")
        engine, known = self.engine, {each.request for each in self.asked}
        session = talk.session if talk else None

        def ask() -> None:
            engine.submit(prompt, max_tokens=count, session=session, parent=parent)

        try:
            self.call(ask)
        except CapacityError:
            self.meets("refused")
        # One whose call was interrupted is there or is not.
        new = [each for each in (*engine.active, *engine.waiting) if each not in known]
        assert len(new) <= 1, "a request was submitted twice"
        if new:
            self.asked.append(asked := Asked(new[0], prompt, count))
            if talk is not None:
                talk.asked = asked

    def advance(self) -> None:
        times = self.random.randint(1, 4)
        self.tell(times)
        for _ in range(times):
            try:
                if not self.call(self.engine.step):
                    return
            except CapacityError:
                assert self.engine.waiting
                assert not self.engine.active
                self.meets("refused")
                self.engine.cancel(self.engine.waiting[0])

    def cancel(self) -> None:
        running = [each.request for each in self.asked if each.request.finish_reason is None]
        request = self.random.choice(running)
        if not self.call(request.cancel):
            request.cancel()

    def open(self) -> None:
        opened: list[Session] = []
        if self.call(lambda: opened.append(self.engine.open())):
            self.talks.append(Talk(opened[0]))

    def fork(self) -> None:
        talk = self.random.choice(self.talks)
        if talk.asked is not None or len(self.talks) > 3:
            return
        position = self.engine.position(talk.session)
        up_to = self.random.choice((None, position, self.random.randint(0, position)))
        forked: list[Session] = []
        try:
            is_whole = self.call(lambda: forked.append(self.engine.fork(talk.session, up_to)))
        except (CapacityError, RewindError):
            self.meets("refused fork")
            return
        if is_whole:
            self.talks.append(Talk(forked[0], talk.tokens[:up_to]))

    def close(self) -> None:
        talk = self.random.choice(self.talks)
        self.talks.remove(talk)
        if not self.call(lambda: self.engine.close(talk.session)):
            self.engine.close(talk.session)

    def compact(self) -> None:
        self.call(self.engine.compact)

    def settle_thread(self) -> None:
        mx.eval(self.engine.cache.state)
