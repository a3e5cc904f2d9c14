"""Runs a launch of a Metal kernel on the CPU, and says what is wrong with it.

The kernel's own file is compiled with the host compiler and its sanitizers, and run for each
thread of the grid, in several thread orders. A finding is one of the kinds that the shim reports
(out-of-range, misaligned, unwritten, written-twice, uninitialized-read, race, order-dependent,
barrier-divergence, simd-divergence, inactive-lane, input-written), `undefined` or `address` of
the sanitizers, or `rejected` by the compiler.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from filelock import FileLock

from mlx_kvcache.store.metal import SHARED_HEADER, Launch, read_source

from .build import CACHE, CompileError, Compiler, compiled
from .signature import signature_of
from .translate import unit

#: In order, in reverse, shuffled twice.
DEFAULT_SEEDS = (0, 1, 2, 3)

_UNDEFINED = re.compile(r"^(\S+?):(\d+):\d+: runtime error: (.*)$", re.MULTILINE)
_ADDRESS = re.compile(r"ERROR: AddressSanitizer:? (\S+)")
_FRAME = re.compile(rf"^\s+#\d+ .* (\S+\.metal|\S*{SHARED_HEADER}):(\d+)", re.MULTILINE)
_REJECTED = re.compile(r"^(?:\S*/)?([^\s:/]+):(\d+):\d+: (?:fatal )?error: (.*)$", re.MULTILINE)
# The sanitizer says this of any program with fibers; they are announced to it (threads.h).
_FIBER_NOTICE = re.compile(r"^==\d+==WARNING: ASan doesn't fully support makecontext.*\n", re.M)
_STORAGE = {mx.bfloat16: mx.uint16}


@dataclass(frozen=True)
class Finding:
    """Something that a correct kernel does not do, and where."""

    kind: str
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.message}"


class KernelFaultError(AssertionError):
    """A kernel with findings; `findings` holds them."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = findings


def _flat(array: mx.array) -> tuple[np.ndarray, np.ndarray, list[int], int]:
    """All bytes that the array's view spans, which of them are its, strides, byte of element 0."""
    stored = array.view(_STORAGE[array.dtype]) if array.dtype in _STORAGE else array
    view = np.array(stored, copy=False)
    item = view.itemsize
    # A size-1 axis has whatever stride MLX left there; it is never stepped along.
    reach = [(n - 1) * s if n > 1 else 0 for n, s in zip(view.shape, view.strides, strict=True)]
    before = -sum(step for step in reach if step < 0)
    span = before + sum(step for step in reach if step > 0) + item
    steps = [s if n > 1 else 0 for n, s in zip(view.shape, view.strides, strict=True)]
    offsets = np.full((1,), before, np.int64)
    for count, step in zip(view.shape, steps, strict=True):
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    present = np.zeros(span, np.uint8)
    data = np.full(span, 0x5A, np.uint8)
    elements = np.ascontiguousarray(view).reshape(-1).view(np.uint8).reshape(-1, item)
    for byte in range(item):
        present[offsets + byte] = 1
        data[offsets + byte] = elements[:, byte]
    strides = [step // item for step in view.strides]
    return data, present, strides, before


def _request(launch: Launch, seeds: tuple[int, ...]) -> bytes:
    parts: list[bytes] = []

    def numbers(*values: int) -> None:
        parts.append(np.array(values, "<i8").tobytes())

    numbers(*launch.grid, *launch.threadgroup, len(seeds), *seeds, len(launch.arrays))
    for array in launch.arrays:
        data, present, strides, origin = _flat(array)
        size = array.dtype.size
        address = np.array(
            array.view(_STORAGE[array.dtype]) if array.dtype in _STORAGE else array, copy=False
        ).ctypes.data
        numbers(size, origin, (address - origin) % 16, array.ndim, *array.shape, *strides)
        numbers(len(data))
        parts += [data.tobytes(), present.tobytes()]
    numbers(len(launch.output_shapes))
    for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True):
        numbers(dtype.size, int(np.prod(shape)) * dtype.size)
    return b"".join(parts)


def _outputs(launch: Launch, raw: bytes) -> tuple[mx.array, ...]:
    outputs, at = [], 0
    for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True):
        count = int(np.prod(shape)) * dtype.size
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
        stored = mx.array(np.frombuffer(raw[at : at + count], unsigned).reshape(shape))
        outputs.append(stored.view(dtype))
        at += count
    return tuple(outputs)


def _sanitizer_findings(text: str) -> list[Finding]:
    found = [
        Finding("undefined", Path(file).name, int(line), message)
        for file, line, message in _UNDEFINED.findall(text)
    ]
    address = _ADDRESS.search(text)
    if address:
        frame = _FRAME.search(text, address.end())
        file, line = (Path(frame[1]).name, int(frame[2])) if frame else ("?", 0)
        found.append(Finding("address", file, line, address[1]))
    return found


def _unit(launch: Launch, body: str | None) -> str:
    text = read_source(launch.kernel.file) if body is None else body
    header = (SHARED_HEADER, read_source(SHARED_HEADER))
    return unit(signature_of(launch, text), header, (launch.kernel.file, text))


def prepare(kernels: list[tuple[Launch, str | None]], compiler: Compiler) -> None:
    """Compiles launches with their bodies, as many at a time as there are cores.

    What the compiler refuses is left for `examine` to report. Of several processes one compiles,
    and the others find what it has made.
    """

    def attempt(source: str) -> None:
        with contextlib.suppress(CompileError):
            compiled(source, compiler)

    sources = [_unit(launch, body) for launch, body in kernels]
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(CACHE / "prepare.lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, sources))


def examine(
    launch: Launch,
    compiler: Compiler,
    *,
    body: str | None = None,
    seeds: tuple[int, ...] = DEFAULT_SEEDS,
) -> tuple[tuple[mx.array, ...], tuple[Finding, ...]]:
    """The outputs and all findings of one launch. `body` replaces the text of the kernel's file.

    After a finding that ends the run the outputs are empty.
    """
    source = _unit(launch, body)
    try:
        program = compiled(source, compiler)
    except CompileError as error:
        found = _REJECTED.search(str(error))
        place = (found[1], int(found[2]), found[3]) if found else ("?", 0, str(error))
        return (), (Finding("rejected", *place),)
    mx.eval(*launch.arrays)
    with tempfile.NamedTemporaryFile() as outputs:
        done = subprocess.run(
            [program, outputs.name],
            input=_request(launch, seeds),
            capture_output=True,
            timeout=120,
            check=False,
            env=compiler.environment,
        )
        raw = outputs.read()
    errors = _FIBER_NOTICE.sub("", done.stderr.decode(errors="replace"))
    findings = _sanitizer_findings(errors)
    lines = done.stdout.decode(errors="replace").splitlines()
    for line in lines:
        if line.startswith("finding\t"):
            _, kind, file, number, _, message = line.split("\t", 5)
            findings.append(Finding(kind, Path(file).name, int(number), message))
    finished = bool(lines) and lines[-1] == "done"
    if not finished and not findings:
        raise RuntimeError(f"the host program failed ({done.returncode}): {errors[-2000:]}")
    if errors.strip() and not findings:
        raise RuntimeError(f"the host program wrote to its standard error: {errors[-2000:]}")
    return (_outputs(launch, raw) if finished else ()), tuple(findings)


def run(launch: Launch, compiler: Compiler, **options: object) -> tuple[mx.array, ...]:
    """The outputs of one launch; raises `KernelFaultError` if there is any finding."""
    outputs, findings = examine(launch, compiler, **options)  # type: ignore[arg-type]
    if findings:
        raise KernelFaultError(findings)
    return outputs
