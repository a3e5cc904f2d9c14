"""What every benchmark shares: the machine, spreads, paired ratios, and the order of turns."""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

import mlx_kvcache

#: The two caches that take turns, in the order of every table.
OURS = "mlx_kvcache"
THEIRS = "mlx-lm"
NAMES = (OURS, THEIRS)


@dataclass(frozen=True)
class Machine:
    """Where the figures come from. `load` is the one-minute load average at the start."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    device: str
    metal: bool
    preload: str
    load: float | None
    python: str
    mlx: str
    mlx_lm: str
    mlx_kvcache: str
    started: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            cpu=_cpu_model(),
            cores=os.cpu_count() or 1,
            memory_bytes=psutil.virtual_memory().total,
            system=platform.platform(),
            device=_device_name(),
            metal=runs_on_metal(),
            preload=os.environ.get("LD_PRELOAD", ""),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            python=platform.python_version(),
            mlx=version("mlx"),
            mlx_lm=version("mlx-lm"),
            mlx_kvcache=mlx_kvcache.__version__,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def warning(self) -> str:
        """What has to stand above every figure that was not taken on Metal, else nothing."""
        return "" if self.metal else "CPU figures; not Metal"

    @property
    def line(self) -> str:
        """The machine, the device and the versions, in one line."""
        memory = f", {self.memory_bytes / 2**30:.0f} GiB"
        preload = f", preloaded {Path(self.preload).name}" if self.preload else ""
        load = "" if self.load is None else f", load {self.load:.2f}"
        return (
            f"{self.cpu}, {self.cores} cores{memory}, {self.system}; device {self.device}{preload}"
            f"{load}; Python {self.python}, mlx {self.mlx}, mlx-lm {self.mlx_lm}, "
            f"mlx_kvcache {self.mlx_kvcache}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "warning": self.warning}


def runs_on_metal() -> bool:
    """Whether the default device is a GPU that Metal drives."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


def _device_name() -> str:
    device = mx.default_device()
    if device.type == mx.DeviceType.gpu:
        return "GPU (Metal)" if mx.metal.is_available() else "GPU (not Metal)"
    return "CPU"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    name = mx.device_info(mx.default_device()).get("device_name")
    return str(name or platform.processor() or platform.machine())


@dataclass(frozen=True)
class Spread:
    """A median, the middle half of the samples (quartiles), and the extremes."""

    count: int
    median: float
    lower: float
    upper: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample."""
        if not samples:
            raise ValueError("there is nothing to take a median of")
        lower, median, upper = (
            statistics.quantiles(samples, n=4, method="inclusive")
            if len(samples) > 1
            else [samples[0]] * 3
        )
        return cls(len(samples), median, lower, upper, min(samples), max(samples))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(
            self.count,
            *(
                value * factor
                for value in (self.median, self.lower, self.upper, self.minimum, self.maximum)
            ),
        )

    def quartiles(self, form: str = ".2f") -> str:
        """`median [lower quartile, upper quartile]`."""
        return f"{self.median:{form}} [{self.lower:{form}}, {self.upper:{form}}]"

    def extremes(self, form: str = ".2f") -> str:
        """`median (minimum-maximum)`."""
        return f"{self.median:{form}} ({self.minimum:{form}}-{self.maximum:{form}})"

    def as_dict(self) -> dict[str, float]:
        """For a JSON file."""
        return asdict(self)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The spread of ours / theirs, taken pair by pair: drift of the machine cancels out."""
    return Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def turns(rounds: int, count: int = 2) -> Iterator[tuple[int, ...]]:
    """The order in which `count` contenders run in each of `rounds` rounds.

    Two alternate: AB, BA, AB, ... More are shuffled, the same way in every run, so that none has
    a fixed neighbor whose rows or absence it would find in the processor's caches.
    """
    shuffle = random.Random(0)
    forward = tuple(range(count))
    for number in range(rounds):
        if count > 2:
            yield tuple(shuffle.sample(forward, count))
        else:
            yield forward if number % 2 == 0 else forward[::-1]


@contextmanager
def without_collection() -> Iterator[None]:
    """Python's cyclic garbage collector off, so that it strikes neither side by chance."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def alternate(
    steps: int, contenders: Sequence[Callable[[], tuple[float, float]]]
) -> list[list[tuple[float, float]]]:
    """Run each contender once a round, in the order of `turns`; its answers, by contender.

    A contender runs one step and answers (seconds building the graph, seconds in all).
    """
    times: list[list[tuple[float, float]]] = [[] for _ in contenders]
    with without_collection():
        for order in turns(steps, len(contenders)):
            for index in order:
                times[index].append(contenders[index]())
    return times
