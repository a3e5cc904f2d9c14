"""Compiles generated units, once for each text, compiler and shim."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SHIM = Path(__file__).parent / "shim"
RUNTIME = Path(__file__).parent / "runtime"
CACHE = Path(
    os.environ.get("MLX_KVCACHE_HOST_CACHE", "")
    or Path(tempfile.gettempdir()) / f"mlx_kvcache_host_{os.getuid()}"
)
COMMON_FLAGS = ("-std=c++17", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off")
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow"
KERNEL_FLAGS = (
    *COMMON_FLAGS,
    # Most programs run for less time than an optimizer would, and no access is optimized away.
    "-O0",
    SANITIZERS,
    # A local that was never set is garbage, not the zero that a fresh stack happens to hold.
    "-ftrivial-auto-var-init=pattern",
    "-Wall",
    "-Werror=uninitialized",
    "-Werror=return-type",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
)
#: Tells the runtime which functions a thread is in.
FUNCTION_FLAGS = ("-finstrument-functions",)
#: The runtime is the checker, not what is checked: it needs speed.
RUNTIME_FLAGS = (*COMMON_FLAGS, "-O2", "-Wall", "-Wextra")
#: Links in half the time, where it is installed.
LINKER_FLAGS = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
TIMEOUT_SECONDS = 120
_RUNTIME_LOCK = threading.Lock()


class CompileError(Exception):
    """The host compiler refused a unit; the text is its output."""


@dataclass(frozen=True)
class Compiler:
    """A host compiler: its command and what `--version` says."""

    command: str
    version: str

    @property
    def environment(self) -> dict[str, str]:
        """What a compiled program needs to report rather than to stop at the first finding."""
        return {
            # A library preloaded for this process would stand before the sanitizer's runtime.
            **{name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
            "UBSAN_OPTIONS": "print_stacktrace=0",
        }


@cache
def find(command: str) -> Compiler | None:
    """The compiler of that name, or None where it is not installed."""
    path = shutil.which(command)
    if path is None:
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return Compiler(path, version.stdout)


@cache
def _shim_digest() -> str:
    digest = hashlib.sha256(f"{KERNEL_FLAGS}{RUNTIME_FLAGS}".encode())
    for path in sorted([*SHIM.iterdir(), *RUNTIME.iterdir()]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _key(compiler: Compiler, text: str) -> str:
    return hashlib.sha256(f"{compiler}{_shim_digest()}{text}".encode()).hexdigest()[:32]


def _compile(arguments: list[str], target: Path) -> None:
    """Runs the compiler on a temporary target, and moves the result into place when it is whole."""
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=CACHE, suffix=target.suffix)
    os.close(handle)
    done = subprocess.run(
        [*arguments, f"-I{SHIM}", "-o", name],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        Path(name).unlink(missing_ok=True)
        raise CompileError(done.stderr)
    os.replace(name, target)


def _runtime(compiler: Compiler) -> tuple[str, ...]:
    with _RUNTIME_LOCK:
        return _built_runtime(compiler)


@cache
def _built_runtime(compiler: Compiler) -> tuple[str, ...]:
    """The object files of the runtime."""
    objects = []
    for source in sorted(RUNTIME.glob("*.cpp")):
        target = CACHE / f"{source.stem}_{_key(compiler, source.name)}.o"
        if not target.exists():
            _compile([compiler.command, *RUNTIME_FLAGS, "-c", str(source)], target)
        objects.append(str(target))
    return tuple(objects)


def compiled(source: str, compiler: Compiler, flags: tuple[str, ...] = ()) -> Path:
    """The program of a unit, compiled with further flags. Raises `CompileError`."""
    program = CACHE / f"kernel_{_key(compiler, f'{flags}{source}')}"
    if program.exists():
        os.utime(program)
    else:
        runtime = _runtime(compiler)
        unit = CACHE / f"{program.name}_{os.getpid()}_{threading.get_ident()}.cpp"
        unit.write_text(source, encoding="utf-8")
        try:
            options = (*KERNEL_FLAGS, *flags, *LINKER_FLAGS)
            _compile([compiler.command, *options, str(unit), *runtime], program)
        finally:
            unit.unlink()
    return program


def prune(days: float = 3) -> None:
    """Removes what was not used for some days: every change of a kernel leaves programs behind."""
    oldest = time.time() - days * 86400
    for path in CACHE.glob("*") if CACHE.exists() else ():
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
