"""Runs a launch of a Metal kernel on the CPU, and says what is wrong with it.

The kernel's own file is compiled with the host compiler and its sanitizers, and run for each
thread of the grid, in several thread orders. A finding is one of the kinds that the shim reports
(out-of-range, misaligned, unwritten, written-twice, uninitialized-read, race, order-dependent,
barrier-divergence, simd-divergence, inactive-lane, input-written, limit, recursion), `undefined`
or `address` of the sanitizers, or `rejected` by the compiler or by Metal's own rules.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from filelock import FileLock

from mlx_kvcache.store.metal import SHARED_HEADER, Launch, Size, read_source

from .build import CACHE, FUNCTION_FLAGS, CompileError, Compiler, compiled
from .rules import may_recurse, refusals, type_names
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


@dataclass(frozen=True)
class Part:
    """What to run of a launch that is too large to run, and where its arrays lie.

    groups: positions of threadgroups; none stand for all. written: for each output the first
    element that these groups write and how many; none stand for all. strides: of the inputs of
    these numbers, in elements, in place of their own; of the memory between only pages that hold
    an element take room.
    """

    groups: tuple[Size, ...] = ()
    written: tuple[tuple[int, int], ...] = ()
    strides: tuple[tuple[int, tuple[int, ...]], ...] = ()


def _view(array: mx.array) -> np.ndarray:
    return np.array(
        array.view(_STORAGE[array.dtype]) if array.dtype in _STORAGE else array, copy=False
    )


@cache
def _buffer_alignment() -> int:
    """Where MLX begins a buffer here, modulo 16; on a GPU it is 0."""
    fresh = mx.zeros(16)
    mx.eval(fresh)
    return _view(fresh).ctypes.data % 16


def _strides(view: np.ndarray) -> tuple[int, ...]:
    return tuple(step // view.itemsize for step in view.strides)


def _elements(view: np.ndarray, strides: tuple[int, ...]) -> bytes:
    """The elements in order, those along an axis of stride 0 once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)
    return np.ascontiguousarray(view[once]).tobytes()


def _outputs_of(launch: Launch) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    return list(zip(launch.output_shapes, launch.output_dtypes, strict=True))


def _request(launch: Launch, seeds: tuple[int, ...], part: Part) -> bytes:
    parts: list[bytes] = []

    def numbers(*values: int) -> None:
        parts.append(np.array(values, "<i8").tobytes())

    numbers(*launch.grid, *launch.threadgroup, len(seeds), *seeds, len(part.groups))
    for position in part.groups:
        numbers(*position)
    numbers(len(launch.arrays))
    given = dict(part.strides)
    for number, array in enumerate(launch.arrays):
        view = _view(array)
        strides = given.get(number, _strides(view))
        alignment = (view.ctypes.data - _buffer_alignment()) % 16
        numbers(array.dtype.size, alignment, array.ndim, *array.shape, *strides)
        parts.append(_elements(view, strides))
    numbers(len(launch.output_shapes))
    for number, (shape, dtype) in enumerate(
        zip(launch.output_shapes, launch.output_dtypes, strict=True)
    ):
        first, count = part.written[number] if part.written else (0, math.prod(shape))
        numbers(dtype.size, math.prod(shape) * dtype.size, first * dtype.size, count * dtype.size)
        value = launch.init_value
        numbers(value is not None)
        initial = mx.array(0.0 if value is None else value).astype(dtype)
        parts.append(_view(initial).tobytes())
    return b"".join(parts)


def _outputs(launch: Launch, raw: bytes, part: Part) -> tuple[mx.array, ...]:
    outputs, at = [], 0
    for number, (shape, dtype) in enumerate(
        zip(launch.output_shapes, launch.output_dtypes, strict=True)
    ):
        held = (part.written[number][1],) if part.written else shape
        count = math.prod(held) * dtype.size
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
        stored = mx.array(np.frombuffer(raw[at : at + count], unsigned).reshape(held))
        outputs.append(stored.view(dtype))
        at += count
    return tuple(outputs)


WHOLE = Part()


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


@dataclass(frozen=True)
class Text:
    """The text of a kernel and of the header it is compiled with; None for those of the files."""

    body: str | None = None
    header: str | None = None

    def of(self, launch: Launch) -> tuple[str, str]:
        """The body and the header for a launch."""
        body = read_source(launch.kernel.file) if self.body is None else self.body
        return body, read_source(SHARED_HEADER) if self.header is None else self.header


FILES = Text()


def _unit(launch: Launch, text: Text) -> str:
    body, header = text.of(launch)
    return unit(signature_of(launch, body), (SHARED_HEADER, header), (launch.kernel.file, body))


def _flags(launch: Launch, text: Text) -> tuple[str, ...]:
    return FUNCTION_FLAGS if any(may_recurse(source) for source in text.of(launch)) else ()


def _refused(launch: Launch, text: Text) -> tuple[Finding, ...]:
    body, header = text.of(launch)
    texts = ((SHARED_HEADER, header, False), (launch.kernel.file, body, True))
    types = type_names(header) | {
        name for name, value in launch.template if isinstance(value, mx.Dtype)
    }
    return tuple(
        Finding("rejected", file, refusal.line, refusal.reason)
        for file, source, in_function in texts
        for refusal in refusals(source, in_function=in_function, types=types)
    )


def prepare(kernels: list[tuple[Launch, Text]], compiler: Compiler) -> None:
    """Compiles launches with their texts, as many at a time as there are cores.

    What the compiler refuses is left for `examine` to report. Of several processes one compiles,
    and the others find what it has made.
    """

    def attempt(kernel: tuple[Launch, Text]) -> None:
        with contextlib.suppress(CompileError):
            compiled(_unit(*kernel), compiler, _flags(*kernel))

    accepted = [kernel for kernel in kernels if not _refused(*kernel)]
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(CACHE / "prepare.lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, accepted))


def examine(
    launch: Launch,
    compiler: Compiler,
    *,
    text: Text = FILES,
    seeds: tuple[int, ...] = DEFAULT_SEEDS,
    part: Part = WHOLE,
) -> tuple[tuple[mx.array, ...], tuple[Finding, ...]]:
    """The outputs and all findings of one launch.

    After a finding that ends the run the outputs are empty. Of a `part` the outputs are what it
    writes, flat.
    """
    refused = _refused(launch, text)
    if refused:
        return (), refused
    try:
        program = compiled(_unit(launch, text), compiler, _flags(launch, text))
    except CompileError as error:
        found = _REJECTED.search(str(error))
        place = (found[1], int(found[2]), found[3]) if found else ("?", 0, str(error))
        return (), (Finding("rejected", *place),)
    mx.eval(*launch.arrays)
    with tempfile.NamedTemporaryFile() as outputs:
        done = subprocess.run(
            [program, outputs.name],
            input=_request(launch, seeds, part),
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
    return (_outputs(launch, raw, part) if finished else ()), tuple(findings)


def run(launch: Launch, compiler: Compiler, **options: object) -> tuple[mx.array, ...]:
    """The outputs of one launch; raises `KernelFaultError` if there is any finding."""
    outputs, findings = examine(launch, compiler, **options)  # type: ignore[arg-type]
    if findings:
        raise KernelFaultError(findings)
    return outputs
