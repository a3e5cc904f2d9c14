"""What does a write into a wrapped ring cost: our Metal kernel, or MLX's slice update?

    python benchmarks/ring_write.py [--heads 8] [--dim 128] [--dtype bfloat16] [--json FILE]

For each ring size R and step size T it times both paths of `ring_write` (store/kernels.py), from
a slot such that the step wraps (one row cannot). It says from which T on the kernel is faster, and
from which T on the rule by bytes (`store/choice.py`) would take it. GB/s count the bytes that a
path has to read and to write. Without a Metal GPU only the MLX ops are timed, on the CPU, and the
output says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlx_kvcache.store import choice as kernel_choice
from mlx_kvcache.store import kernels
from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store import ops as kernel_ops

Write = Callable[[mx.array, mx.array, int], mx.array]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
#: Writes in one evaluation, so that what is timed is the device and not the wait for it.
CHAIN = 16


@dataclass(frozen=True)
class Measurement:
    """One path at one size. `device` is where it ran, as MLX names it."""

    device: str
    path: str
    ring_rows: int
    step_rows: int
    microseconds: float
    gigabytes_per_second: float


def write_by_kernel(ring: mx.array, rows: mx.array, slot: int) -> mx.array:
    """The Metal kernel, whatever the rule says."""
    return metal_kernels.run(metal_kernels.ring_write(ring, rows, slot))[0]


def seconds_for_one(
    write: Write, shape: tuple[int, ...], steps: int, dtype: mx.Dtype, repeats: int
) -> float:
    """The median time of one write, out of chains in which each write takes the last one's ring."""
    batch, heads, slots, dim = shape
    rows = mx.random.normal((batch, heads, steps, dim)).astype(dtype)
    ring = mx.zeros(shape, dtype)
    slot = slots - 1 - min(steps, slots) // 2
    mx.eval(ring, rows)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(CHAIN):
            ring = write(ring, rows, slot)
        mx.eval(ring)
        times.append((time.perf_counter() - start) / CHAIN)
    return statistics.median(times[2:])


def measure(
    path: str, write: Write, shape: tuple[int, ...], steps: int, dtype: mx.Dtype, repeats: int
) -> Measurement:
    """Times one path and sets its bytes against the time."""
    batch, heads, slots, dim = shape
    costs = kernel_choice.ring_write_costs(
        steps, slots, batch * heads * dim * dtype.size, runs=2, shared=False
    )
    traffic = costs.metal if path == "kernel" else costs.ops
    seconds = seconds_for_one(write, shape, steps, dtype, repeats)
    return Measurement(
        device=str(mx.default_device()),
        path=path,
        ring_rows=slots,
        step_rows=steps,
        microseconds=seconds * 1e6,
        gigabytes_per_second=traffic.bytes / seconds / 1e9,
    )


def first_step(steps: Sequence[int], wins: Callable[[int], bool]) -> str:
    """The first step size from which on the kernel always wins, in words."""
    for number, step in enumerate(steps):
        if all(wins(later) for later in steps[number:]):
            return f"T = {step}"
    return "no T measured"


def show(slots: int, steps: Sequence[int], found: dict[tuple[str, int], Measurement]) -> None:
    """The table of one ring size, and on Metal its crossover."""
    paths = [path for path in ("ops", "kernel") if (path, steps[0]) in found]
    print(f"\nring of {slots} rows")
    print(f"{'T':>6}" + "".join(f"{path + ' us':>14}{'GB/s':>9}" for path in paths))
    for step in steps:
        cells = [found[path, step] for path in paths]
        text = "".join(f"{c.microseconds:>14.1f}{c.gigabytes_per_second:>9.1f}" for c in cells)
        print(f"{step:>6}{text}")
    if "kernel" not in paths:
        return

    def ruled(step: int) -> bool:
        costs = kernel_choice.ring_write_costs(step, slots, 1, runs=2, shared=False)
        return kernel_choice.cheaper_path(costs) == "metal"

    def measured(step: int) -> bool:
        return found["kernel", step].microseconds < found["ops", step].microseconds

    print(f"kernel faster from {first_step(steps, measured)} on; the rule takes it from "
          f"{first_step(steps, ruled)} on")  # fmt: skip


def heading(on_metal: bool) -> str:
    """Where the figures come from. A CPU's never stand under the name of Metal."""
    machine = f"{platform.machine()}, {platform.platform()}, mlx {version('mlx')}"
    if on_metal:
        return f"Metal GPU: {mx.device_info().get('device_name', 'unnamed')} ({machine})"
    return (
        f"CPU, MLX ops only ({machine})\n"
        "There is no Metal GPU here, so the kernel was not run and there is no crossover to report."
    )


def run(options: argparse.Namespace) -> list[Measurement]:
    """All measurements, printed as they come."""
    on_metal = kernels.metal_is_current()
    print(heading(on_metal))
    paths: dict[str, Write] = {"ops": kernel_ops.ring_write}
    if on_metal:
        paths["kernel"] = write_by_kernel
    dtype = DTYPES[options.dtype]
    everything: list[Measurement] = []
    for slots in options.rings:
        shape = (options.batch, options.heads, slots, options.dim)
        steps = sorted(
            {1, 8, 64, slots // 4, slots // 2, 3 * slots // 4, slots - 1, slots, 2 * slots}
        )
        found = {
            (path, step): measure(path, write, shape, step, dtype, options.repeats)
            for step in steps
            for path, write in paths.items()
        }
        show(slots, steps, found)
        everything += found.values()
    return everything


def main() -> None:
    """Reads the options, runs, and writes the figures to a file if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rings", type=int, nargs="+", default=[512, 1024, 4096], metavar="R")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures = run(options)
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
