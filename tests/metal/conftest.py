"""Where a kernel test runs: through each host compiler, and on a real GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store.metal import Launch
from tests.support import kernel_launches

from .host import build, executor

COMPILERS = ("g++", "clang++")
HOST_PLACES = [
    pytest.param(name, marks=[pytest.mark.metal_host, pytest.mark.slow]) for name in COMPILERS
]


def pytest_sessionfinish() -> None:
    build.prune()


@dataclass(frozen=True)
class Runner:
    """Somewhere to run a launch: `run` raises when the place can tell that the kernel is wrong."""

    name: str
    run: Callable[[Launch], tuple[mx.array, ...]]


def compiler_named(command: str) -> build.Compiler:
    """The compiler, or a skip that says what is missing."""
    found = build.find(command)
    if found is None:
        pytest.skip(f"{command} is not installed")
    if "Apple" in found.version:
        pytest.skip(
            "the host executor needs fibers, which macOS has deprecated; the GPU runs there"
        )
    return found


def _runner(place: str) -> Runner:
    if place == "gpu":
        if not mx.metal.is_available():
            pytest.skip("this MLX has no Metal")
        return Runner("gpu", metal_kernels.run)
    compiler = compiler_named(place)
    executor.prepare([(launch, executor.FILES) for launch in kernel_launches.launches()], compiler)
    return Runner(place, lambda launch: executor.run(launch, compiler))


@pytest.fixture(
    scope="session",
    params=[*HOST_PLACES, pytest.param("gpu", marks=pytest.mark.metal_gpu)],
)
def runner(request: pytest.FixtureRequest) -> Runner:
    """Each place in turn that can run a kernel."""
    return _runner(request.param)


@pytest.fixture(scope="session", params=HOST_PLACES)
def compiler(request: pytest.FixtureRequest) -> build.Compiler:
    """Each host compiler in turn."""
    return compiler_named(request.param)
