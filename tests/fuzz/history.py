"""One random history: verbs drawn one after the other, and an interrupt in some of them."""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, ClassVar

from tests.support.interrupts import Fuse

#: An interrupt falls after 1 to so many points, small numbers more often.
LAST_POINT_LOG2 = 10.5
#: MLX keeps a stream, and a thread of its own, for every thread that has computed anything.
_THREADS = tuple(ThreadPoolExecutor(max_workers=1) for _ in range(3))


class History(ABC):
    """A cache, its oracle, and what happens to them, all drawn from one seed.

    Each verb has a generator of its own, so that a history is much the same without one of them.

    kind: its name on the command line. turns: how many verbs at most. must_meet: what a run of
    many such histories must have met to have shown anything. met: counts what was met.
    """

    kind: ClassVar[str]
    turns: ClassVar[int]
    must_meet: ClassVar[tuple[str, ...]]
    interrupt_chance: ClassVar[float] = 0.15
    thread_chance: ClassVar[float] = 0.03
    #: Bytes that MLX keeps for the functions that a model compiles: less than any of its caches.
    compiled_bytes: ClassVar[int] = 0

    def __init__(self, seed: int, met: Counter[str]) -> None:
        self.seed = seed
        self.met = met
        self.told: list[str] = []
        self.was_in_thread = False
        self.random = Random(f"{self.kind} {seed}")
        self.length = self.random.randint(self.turns // 3, self.turns)
        self.begin()

    @classmethod  # noqa: B027 (most share nothing)
    def prepare(cls) -> None:
        """Make what histories of this kind share, which stays."""

    @abstractmethod
    def begin(self) -> None:
        """Draw what the history is about, and make it."""

    @abstractmethod
    def verbs(self) -> Mapping[str, float]:
        """The verbs that are possible now, which are methods, and how likely each of them is."""

    @abstractmethod
    def check(self) -> None:
        """Compare everything with the oracle."""

    def end(self) -> None:  # noqa: B027 (most have nothing more)
        """Check what can only be checked at the end."""

    def settle_thread(self) -> None:  # noqa: B027 (few leave anything)
        """Leave nothing that only the running thread can compute."""

    def turn(self, index: int) -> None:
        """The verb of this number, and all checks after it."""
        self.random = Random(f"{self.kind} {self.seed} {index}")
        verbs = self.verbs()
        (name,) = self.random.choices([*verbs], [*verbs.values()])
        self.told.append(f"{index}: {name}")
        self.met[name] += 1
        getattr(self, name)()
        self.check()

    def tell(self, *details: object) -> None:
        """Say more of the verb that runs."""
        self.told[-1] += "".join(f" {detail}" for detail in details)

    def meets(self, what: str, count: int = 1) -> None:
        """Count something that was met; nothing else depends on it."""
        if count:
            self.met[what] += int(count)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def call(self, verb: Callable[[], Any]) -> bool:
        """Run a verb, which may be interrupted; whether it was not."""
        fuse = None
        self.was_in_thread = False
        if self.chance(self.interrupt_chance):
            fuse = Fuse(int(2 ** self.random.uniform(0, LAST_POINT_LOG2)) - 1)
        guarded = verb if fuse is None else lambda: fuse.call(verb)
        try:
            if self.chance(self.thread_chance):
                self._call_in_thread(guarded)
            else:
                guarded()
        except KeyboardInterrupt:
            if fuse is None or fuse.place is None:
                raise
            file, line = fuse.place
            self.tell(f"[interrupted at {file}:{line}]")
            self.met["interrupts"] += 1
            self.met[f"interrupted {self.told[-1].split()[1]}"] += 1
            return False
        return True

    def _call_in_thread(self, verb: Callable[[], Any]) -> None:
        self.settle_thread()
        self.tell("in a thread")
        self.was_in_thread = True
        self.met["in a thread"] += 1

        def run() -> None:
            try:
                verb()
            finally:
                self.settle_thread()

        thread = _THREADS[self.met["in a thread"] % len(_THREADS)]
        thread.submit(contextvars.copy_context().run, run).result()
