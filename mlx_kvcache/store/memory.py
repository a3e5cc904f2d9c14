"""How much memory is left, and what of a growth can be had.

MLX allocates when it evaluates, on a thread of its own: what cannot be had ends the process there,
or lets the system end it later. So it is counted and refused before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_kvcache.errors import MemoryLimitError
from mlx_kvcache.facts.config import memory_limit

#: Growths are not worth a look at the machine until they add up to this.
UNCHECKED_BYTES = 8 * 2**20
#: What is left to everything else: an eighth, and not more than this.
LARGEST_RESERVE = 512 * 2**20
#: Address space that threads take for stacks, arenas and buffers when they first run.
THREADS_BYTES = 192 * 2**20
#: By so much the address space of two equal runs may differ: an arena of malloc's.
ARENA_BYTES = 64 * 2**20
#: Where Linux says what is used and allowed.
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

#: Bytes for a number of positions, or the like; they never fall as it rises.
Cost = Callable[[int], int]


def available_bytes() -> int | None:
    """Bytes that can be allocated now, less a reserve for everything else; None: not known.

    The least of what the GPU, the machine, its control groups and the limits of this process
    leave, or the `memory_limit`. Raises `ConfigError` when that is no number.
    """
    limit = memory_limit()
    if limit is not None:
        return limit
    left = min((*_of_device(), *_of_machine(), *_of_groups(), *_of_process()), default=None)
    return None if left is None else max(0, left - min(max(0, left) // 8, LARGEST_RESERVE))


class _Unchecked:
    """The bytes of growths since the machine was looked at last."""

    bytes = 0


_unchecked = _Unchecked()


class Named(NamedTuple):
    """What a refusal names: the largest number up to `most` whose `cost` can be had, of `units`."""

    most: int
    cost: Cost
    units: str


def affordable(
    least: int, most: int, cost: Cost, what: str, named: Named, grows: bool = True
) -> int:
    """The largest number from `least` to `most` whose bytes can be had.

    grows: whether they are taken then. Raises `MemoryLimitError` when there is none; `what` are
    the rows that `least` stands for.
    """
    asked = cost(most)
    if _unchecked.bytes + asked <= UNCHECKED_BYTES:
        if grows:
            _unchecked.bytes += asked
        return most
    available = available_bytes()
    if available is None or asked <= available:
        _unchecked.bytes = 0
        return most
    needed = cost(least)
    if needed <= available:
        _unchecked.bytes = 0
        return _largest(least, most, cost, available)
    # What is left changes from moment to moment, and the number named should hold.
    less = min(available // 4, available // 16 + ARENA_BYTES)
    fits = max(0, _largest(-1, named.most, named.cost, available - less))
    raise MemoryLimitError(
        f"{what} need {_shown(needed)} more, but {_shown(available)} can be had, enough for {fits} "
        f"{named.units}; lower the initial capacity, the reservation or the length to that, store "
        "16-bit numbers (kv_dtype), or free memory",
        needed,
        available,
        fits,
    )


def _largest(fits: int, most: int, cost: Cost, available: int) -> int:
    """The largest number from `fits` to below `most` that costs no more than what is available."""
    while most - fits > 1:
        middle = (fits + most) // 2
        if cost(middle) <= available:
            fits = middle
        else:
            most = middle
    return fits


def _shown(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count} bytes ({count / size:.1f} {unit})"
    return f"{count} bytes"


def _of_device() -> Iterator[int]:
    """What a Metal GPU may still use; freed buffers that MLX keeps are given back on demand."""
    if mx.metal.is_available():
        limit = mx.device_info().get("max_recommended_working_set_size")
        if isinstance(limit, int):
            yield limit - mx.get_active_memory()


def _of_machine() -> Iterator[int]:
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_process() -> Iterator[int]:
    """What the limits of this process leave (`ulimit -v`, `ulimit -d`)."""
    try:
        import resource
    except ImportError:
        return
    used = dict(line.split(":", 1) for line in _lines(PROC / "self" / "status") if ":" in line)
    for name, limit in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY and name in used:
            yield allowed - int(used[name].split()[0]) * 1024 - THREADS_BYTES


def _of_groups() -> Iterator[int]:
    """What each control group above this process leaves, of either version."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            files = (
                CGROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        root, *names = files
        # Inside a container the path may be that outside of it: its own group is the root then.
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            yield from _of_group(directory, *names)
            if directory == root:
                break


def _of_group(directory: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    allowed, used = _lines(directory / limit), _lines(directory / usage)
    if not allowed or not used or not allowed[0].isdecimal():
        return
    # Pages of files that nobody uses are dropped before memory runs out.
    pages = [
        line.split()[1] for line in _lines(directory / "memory.stat") if line.split()[0] == cached
    ]
    yield int(allowed[0]) - int(used[0]) + sum(map(int, pages))


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where it is not there."""
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
