"""The cache alone, against mlx-lm's KVCache and RotatingKVCache in the same run.

What does the host pay for a decode step? Does a step cost more when more rows are allocated?
How many bytes does growth copy? See README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from capacity_steps import capacity_results, check_capacities
from common import OURS, THEIRS, Machine
from contenders import Shape
from growth_copies import growth_results
from host_steps import Phase, flat_phases, ring_phases
from report import JSONFile, MarkdownFlag, Report, mebibytes, require_directory

_EXAMPLES = """
Examples:

  python benchmarks/cache_steps.py

  python benchmarks/cache_steps.py --only flat --only ring --steps 5000

  python benchmarks/cache_steps.py --only capacity --layers 1 --dtype float16 --json steps.json
"""


class Part(StrEnum):
    """One question."""

    FLAT = "flat"
    RING = "ring"
    CAPACITY = "capacity"
    GROWTH = "growth"


class DType(StrEnum):
    """How keys and values are stored."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def main(
    only: Annotated[
        list[Part] | None, typer.Option(help="Ask only this; may be repeated. Default: all.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Cache layers of a step.")] = 16,
    heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 3,
    dim: Annotated[int, typer.Option(min=1, help="Key and value dim of a head.")] = 64,
    dtype: Annotated[DType, typer.Option(help="Of keys and values.")] = DType.FLOAT32,
    steps: Annotated[int, typer.Option(min=8, help="Timed steps of each cache.")] = 2000,
    prompt: Annotated[int, typer.Option(min=1, help="Rows held before the flat steps.")] = 600,
    window: Annotated[int, typer.Option(min=2, help="Window of the ring layers.")] = 512,
    capacities: Annotated[
        str, typer.Option(help="Rows to allocate, comma-separated.")
    ] = "1024,4096,16384,65536,262144",
    capacity_layers: Annotated[
        int, typer.Option(min=1, help="Layers for the capacity question (memory: all at once).")
    ] = 2,
    visible: Annotated[int, typer.Option(min=4, help="Rows visible at each capacity.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Length to grow to.")] = 32768,
    markdown: MarkdownFlag = False,
    json: JSONFile = None,
) -> None:
    """Time the cache alone, ours and mlx-lm's own in turns."""
    require_directory(json)
    parts = set(only or Part)
    rows = _numbers(capacities)
    if Part.CAPACITY in parts:
        _check(rows, visible)
    shape = Shape(layers, heads, dim, dtype.value)
    wide = Shape(capacity_layers, heads, dim, dtype.value)
    settings = {
        "layers": layers, "heads": heads, "dim": dim, "dtype": dtype.value, "steps": steps,
        "prompt": prompt, "window": window, "capacities": rows,
        "capacity_layers": capacity_layers, "visible": visible, "tokens": tokens,
    }  # fmt: skip
    report = Report("cache_steps", Machine.here(), settings, markdown)
    report.header()
    questions: dict[Part, Callable[[], None]] = {
        Part.FLAT: lambda: _host(report, "flat", flat_phases(shape, prompt, steps)),
        Part.RING: lambda: _host(report, "ring", ring_phases(shape, window, steps)),
        Part.CAPACITY: lambda: _capacity(report, wide, rows, visible, steps),
        Part.GROWTH: lambda: _growth(report, Shape(1, heads, dim, dtype.value), tokens),
    }
    for part, ask in questions.items():
        if part in parts:
            ask()
    if json is not None:
        report.write(json)


def _host(report: Report, kind: str, phases: list[Phase]) -> None:
    report.results[kind] = [phase.as_dict() for phase in phases]
    report.table(
        f"Host microseconds per layer of a decode step, {kind} (median [quartiles])",
        ["steps", OURS, THEIRS, "ratio, step by step"],
        [
            [phase.name, *(side.quartiles() for side in phase.host), phase.ratio.quartiles(".3f")]
            for phase in phases
        ],
    )
    report.table(
        f"The whole step with its evaluation, {kind}: microseconds (median [quartiles])",
        ["steps", OURS, THEIRS],
        [[phase.name, *(side.quartiles(".0f") for side in phase.whole)] for phase in phases],
    )
    grown = [phase for phase in phases if any(phase.growths)]
    if grown:
        report.table(
            f"Steps at which a buffer grew, {kind}: how many, and the slowest in microseconds",
            ["steps", *(f"{name} {what}" for name in (OURS, THEIRS) for what in _GROWTH_COLUMNS)],
            [[phase.name, *_growth_cells(phase)] for phase in grown],
        )


_GROWTH_COLUMNS = ("growths", "max host", "max whole")


def _growth_cells(phase: Phase) -> list[str]:
    cells = []
    for side in phase.growths:
        host = max((built for built, _ in side), default=0.0)
        whole = max((took for _, took in side), default=0.0)
        cells += [str(len(side)), *(f"{value:,.0f}" if side else "-" for value in (host, whole))]
    return cells


def _capacity(report: Report, shape: Shape, rows: list[int], visible: int, steps: int) -> None:
    results = capacity_results(shape, rows, visible, steps)
    report.results["capacity"] = [result.as_dict() for result in results]
    report.table(
        f"A whole decode step of {shape.layers} layers with attention over {visible}-{2 * visible} "
        "rows: microseconds (median [quartiles])",
        ["cache", "rows allocated", "step", f"ratio to {min(rows):,} rows"],
        [
            [
                result.contender,
                f"{result.rows:,}",
                result.step.quartiles(".1f"),
                result.ratio.quartiles(".3f"),
            ]
            for result in results
        ],
    )
    report.note(
        "mlx-lm's cache cannot be told a size; its buffer was made by writing that many rows and "
        "trimming them again."
    )


def _growth(report: Report, shape: Shape, tokens: int) -> None:
    results = growth_results(shape, tokens, prompt=3000, chunk=2048)
    report.results["growth"] = [result.as_dict() for result in results]
    theirs = {result.way: result.copied for result in results if result.contender == THEIRS}
    report.table(
        f"Bytes copied by growth on the way to {tokens:,} tokens, one layer",
        ["way", "cache", "growths", "old rows copied", "new buffers", "held at the end", "ratio"],
        [
            [
                result.way,
                result.contender,
                str(result.growths),
                mebibytes(result.copied),
                mebibytes(result.written),
                mebibytes(result.held),
                _percent(result.copied, theirs.get(result.way, 0), result.contender == OURS),
            ]
            for result in results
        ],
    )


def _percent(copied: int, theirs: int, wanted: bool) -> str:
    return f"{100 * copied / theirs:.2f} %" if wanted and theirs else "-"


def _numbers(text: str) -> list[int]:
    try:
        numbers: list[int] = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise typer.BadParameter(f"--capacities takes positive integers, got {text!r}")
    return numbers


def _check(capacities: list[int], visible: int) -> None:
    try:
        check_capacities(capacities, visible)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


app: Any = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command(epilog=_EXAMPLES)(main)

if __name__ == "__main__":
    app()
