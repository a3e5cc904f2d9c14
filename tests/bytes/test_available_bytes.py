"""What is left of a machine's memory, read from files as Linux writes them."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import LIMIT_VARIABLE
from mlx_kvcache.store import memory
from tests.support import many_sequences_driver as many

MIB = 2**20


class Host:
    """A /proc and a /sys/fs/cgroup in a folder, and limits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limits: dict[int, int] = {}
        (folder / "proc" / "self").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def getrlimit(self, limit: int) -> tuple[int, int]:
        allowed = self.limits.get(limit, resource.RLIM_INFINITY)
        return allowed, allowed


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "LARGEST_RESERVE", 0)
    monkeypatch.setattr(memory, "THREADS_BYTES", 30 * MIB)
    monkeypatch.setattr(resource, "getrlimit", host.getrlimit)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    return host


def meminfo(available: int) -> str:
    return f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable:   {available // 1024} kB\n"


def test_nothing_is_known_where_nothing_says(host: Host) -> None:
    assert memory.available_bytes() is None
    host.write("proc/self/cgroup", "")
    host.write("proc/meminfo", "MemTotal: 5 kB\n")
    assert memory.available_bytes() is None


def test_the_machine(host: Host) -> None:
    host.write("proc/meminfo", meminfo(700 * MIB))
    assert memory.available_bytes() == 700 * MIB


def test_an_eighth_is_left_to_everything_else(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGEST_RESERVE", 100 * MIB)
    for given, left in ((80, 70), (800, 700), (8000, 7900)):
        host.write("proc/meminfo", meminfo(given * MIB))
        assert memory.available_bytes() == left * MIB


GROUP = "a/b"
V1 = {
    "limit": "memory.limit_in_bytes",
    "usage": "memory.usage_in_bytes",
    "cached": "total_inactive_file",
}
V2 = {"limit": "memory.max", "usage": "memory.current", "cached": "inactive_file"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["", "a", "a/b"])
def test_each_group_above_the_process(host: Host, version: int, group: str) -> None:
    names, root = (V1, "cgroup/memory") if version == 1 else (V2, "cgroup")
    line = "4:cpu,memory:/a/b\n3:cpuset:/" if version == 1 else "0::/a/b\n"
    host.write("proc/self/cgroup", line)
    host.write("proc/meminfo", meminfo(900 * MIB))
    unlimited = "9223372036854771712" if version == 1 else "max"
    for each in ("", "a", "a/b"):
        limit = str(500 * MIB) if each == group else unlimited
        host.write(f"{root}/{each}/{names['limit']}", limit)
        host.write(f"{root}/{each}/{names['usage']}", str(300 * MIB))
        pages = f"cache 5\n{names['cached']} {40 * MIB}\nother {names['cached']}\n"
        host.write(f"{root}/{each}/memory.stat", pages)
    assert memory.available_bytes() == 240 * MIB


def test_a_container_sees_its_group_as_the_root(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/../outside\n1:memory:/docker/0123\n")
    host.write("cgroup/memory.max", str(90 * MIB))
    host.write("cgroup/memory.current", str(30 * MIB))
    assert memory.available_bytes() == 60 * MIB
    host.write("cgroup/memory/memory.limit_in_bytes", str(50 * MIB))
    host.write("cgroup/memory/memory.usage_in_bytes", str(30 * MIB))
    assert memory.available_bytes() == 20 * MIB


def test_a_group_that_is_full_leaves_nothing(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/\n")
    host.write("cgroup/memory.max", str(30 * MIB))
    host.write("cgroup/memory.current", str(31 * MIB))
    assert memory.available_bytes() == 0


@pytest.mark.parametrize(
    ("name", "limit"), [("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)]
)
def test_the_limits_of_the_process(host: Host, name: str, limit: int) -> None:
    host.write("proc/meminfo", meminfo(900 * MIB))
    host.write("proc/self/status", f"Name:\tpython\n{name}:\t  {100 * 1024} kB\nThreads:\t2\n")
    assert memory.available_bytes() == 900 * MIB
    host.limits[limit] = 350 * MIB
    assert memory.available_bytes() == 220 * MIB


def test_a_metal_gpu(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.write("proc/meminfo", meminfo(900 * MIB))
    facts = {"max_recommended_working_set_size": 800 * MIB, "device_name": "none"}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 200 * MIB)
    assert memory.available_bytes() == 600 * MIB


def test_a_number_in_the_environment_goes_first(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.write("proc/meminfo", meminfo(900 * MIB))
    monkeypatch.setenv(LIMIT_VARIABLE, " 12345 ")
    assert memory.available_bytes() == 12345
    monkeypatch.setenv(LIMIT_VARIABLE, "")
    assert memory.available_bytes() == 900 * MIB


@pytest.mark.parametrize("wrong", ["4 GiB", "-1", "1e9", "9" * 5000])
def test_a_number_that_is_none_is_refused_where_a_cache_is_made(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    geometry = many.geometry_of((0, 3))
    monkeypatch.setenv(LIMIT_VARIABLE, wrong)
    for make in (MLXSequenceCache, MLXCellCache, MLXBatchedSequenceCache):
        with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
            make(geometry)
    with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
        memory.available_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the files of Linux")
def test_this_machine_says_something() -> None:
    left = memory.available_bytes()
    assert left is not None
    assert 16 * MIB < left < 2**50
