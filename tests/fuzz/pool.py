"""Worker processes: each takes the next histories when it is done; one that dies is replaced."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Histories that a worker is given at once; what they leave behind is counted after them.
BATCH = 50
#: A history that takes longer, in seconds, hangs.
LONGEST = 120.0


@dataclass
class Failure:
    """What differed, leaked, crashed or hung. seed: of the history, or of the first of a batch."""

    what: str
    seed: int
    kind: str = ""
    told: Sequence[str] = ()
    skip: Sequence[int] = ()
    trace: str = ""
    count: int = 1


@dataclass
class Totals:
    """What was run so far. met: by kind, what its histories met."""

    done: int = 0
    met: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class Pool:
    """Runs histories from a seed on, in some processes, until they are through or it is stopped.

    only: the kinds. `wait` passes the time and says whether there is more to come. newest: the
    seed that was begun last. processes: the ids of the workers.
    """

    def __init__(self, first: int, histories: int, only: Sequence[str], workers: int) -> None:
        self.totals = Totals(met={kind: Counter() for kind in only})
        self.newest: int | None = None
        self._workers: set[Worker] = set()
        self._only = only
        self._batches = _batches(first, histories)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        # No thread is joined: a join that Ctrl-C interrupts takes the thread for ended.
        self._feeding = workers
        self._ended = threading.Event()
        for _ in range(workers):
            threading.Thread(target=self._feed, daemon=True).start()

    @property
    def processes(self) -> tuple[int, ...]:
        return tuple(worker.process.pid for worker in self._workers)

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long; whether histories are left to run."""
        return not self._ended.wait(seconds)

    def stop(self) -> None:
        """Run no further history, and end every worker."""
        self._stopping.set()
        self._ended.wait()

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            return None if self._stopping.is_set() else next(self._batches, None)

    def _feed(self) -> None:
        worker: Worker | None = None
        try:
            while (batch := self._next()) is not None:
                first, end = batch[0], sum(batch)
                while first < end and not self._stopping.is_set():
                    if worker is None:
                        worker = Worker(self._only)
                        self._workers.add(worker)
                    died_at = self._run(worker, first, end - first)
                    if died_at is None:
                        break
                    self._workers.discard(worker)
                    worker.close()
                    worker, first = None, died_at + 1
        finally:
            if worker is not None:
                worker.close()
            with self._lock:
                self._feeding -= 1
                if not self._feeding:
                    self._ended.set()

    def _run(self, worker: Worker, first: int, count: int) -> int | None:
        """Run a batch; the seed at which the worker died or hung, None when it is through."""
        worker.ask(first, count)
        seed, begun = first, 0
        waited = 0.0
        while not self._stopping.is_set():
            try:
                said = worker.said.get(timeout=1.0)
            except queue.Empty:
                waited += 1.0
                if waited < LONGEST:
                    continue
                self._note(Failure(f"hung for {LONGEST:.0f} s", seed), begun)
                return seed
            waited = 0.0
            if said is None:
                self._note(Failure(f"crashed: {worker.ending()}", seed), begun)
                return seed
            if "begin" in said:
                seed, begun = said["begin"], begun + 1
                self.newest = seed
            elif "failed" in said:
                names = ("error", "seed", "failed", "told", "skip", "trace")
                self._note(Failure(*(said[name] for name in names)))
            elif "leaked" in said:
                self._note(Failure(said["leaked"], said["first"], count=count))
            else:
                self._count(said)
                return None
        return None

    def _note(self, failure: Failure, done: int = 0) -> None:
        with self._lock:
            self.totals.failures.append(failure)
            self.totals.done += done

    def _count(self, said: dict[str, Any]) -> None:
        with self._lock:
            self.totals.done += said["done"]
            for kind, met in said["met"].items():
                self.totals.met[kind].update(met)


class Worker:
    """A process, and what it says."""

    def __init__(self, only: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker", ",".join(only)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the process that sums up, and sets are to have the same order again.
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self.said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, first: int, count: int) -> None:
        """Ask for these histories. One that has died says so by its silence."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"[{first}, {count}]\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def ending(self) -> str:
        """How the process ended."""
        code = self.process.wait(10)
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))
        self.said.put(None)


def _batches(first: int, histories: int) -> Iterator[tuple[int, int]]:
    for start in range(0, histories, BATCH):
        yield first + start, min(BATCH, histories - start)
