"""Generates with a real model on our cache and on mlx-lm's own, in turns, and compares them.

Tokens a second for prefill and decode, time to first token, bytes held, peak memory, what the
host pays for a token. See README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

import typer
from common import NAMES, OURS, THEIRS, Machine, Spread, paired, turns
from generation import Generation, Side, decode_steps, generate, random_prompt
from model_caches import Makers, bytes_seen, weight_bytes_read
from report import JSONFile, MarkdownFlag, Report, mebibytes, require_directory
from rich.console import Console
from rich.progress import track

from mlx_kvcache import compiled
from mlx_kvcache.errors import KVCacheError
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY

_EXAMPLES = """
Examples:

  python benchmarks/tokens_per_second.py --model smollm2

  python benchmarks/tokens_per_second.py --model gemma3-270m --prompt-tokens 700 --tokens 128

  python benchmarks/tokens_per_second.py --no-compile

  python benchmarks/tokens_per_second.py --model gemma3-270m --windows 64 --repeats 9 --json g.json
"""


class DType(StrEnum):
    """The weights' dtype."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def main(
    model: Annotated[
        str, typer.Option(help="A demo's name, a hub id, a directory or a .gguf file.")
    ] = "smollm2",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Random prompt tokens.")] = 256,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens to generate.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed generations of each cache.")] = 7,
    prefill_step: Annotated[int, typer.Option(min=1, help="Prompt tokens a chunk.")] = 2048,
    dtype: Annotated[
        DType | None, typer.Option(help="Of the weights. Default: as `load` chooses.")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Windows for both caches, one or one per cache layer: 32 or 32,0,32."),
    ] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Of our cache.")] = None,
    initial_capacity: Annotated[
        int, typer.Option(min=0, help="Rows that our layers start with.")
    ] = DEFAULT_INITIAL_CAPACITY,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compiled decode steps on our side.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the random prompt.")] = 0,
    markdown: MarkdownFlag = False,
    json: JSONFile = None,
) -> None:
    """Time generation with a real model, our cache and mlx-lm's own in turns."""
    from mlx_kvcache.models import load

    require_directory(json)
    settings: dict[str, Any] = {
        "model": model, "prompt_tokens": prompt_tokens, "tokens": tokens, "repeats": repeats,
        "prefill_step": prefill_step, "dtype": dtype.value if dtype else "as loaded",
        "windows": windows, "capacity": capacity, "initial_capacity": initial_capacity,
        "compile": compile, "seed": seed,
    }  # fmt: skip
    try:
        network, tokenizer = load(model, dtype=dtype.value if dtype else None)
        makers = Makers(network, _numbers(windows), capacity, initial_capacity)
        ours = compiled(network, typer.echo) if compile else network
        both = (Side(ours, makers.ours), Side(network, makers.theirs))
        prompt = random_prompt(tokenizer, prompt_tokens, seed)
        report = Report("tokens_per_second", Machine.here(), settings, markdown)
        report.header()
        runs = _generations(
            both, lambda side: generate(side, prompt, tokens, prefill_step), repeats
        )
        steps = decode_steps(both, prompt, tokens, prefill_step)
        kv_read = _kv_read(makers, prompt[:2], prompt_tokens + tokens // 2)
    except KVCacheError as error:
        raise typer.BadParameter(str(error)) from error
    _speed(report, runs, steps)
    _memory(report, runs)
    _bandwidth(report, runs, weight_bytes_read(network), kv_read)
    _agreement(report, runs)
    if json is not None:
        report.write(json)


def _generations(
    sides: Sequence[Side], run: Callable[[Side], Generation], repeats: int
) -> list[list[Generation]]:
    """The generations of each side, in turns, after one of each that does not count."""
    for side in sides:
        run(side)
    runs: list[list[Generation]] = [[] for _ in sides]
    console = Console(stderr=True)
    rounds = track(
        list(turns(repeats)), "Generating", console=console, disable=not console.is_terminal,
        transient=True,
    )  # fmt: skip
    for order in rounds:
        for number in order:
            runs[number].append(run(sides[number]))
    return runs


def _kv_read(makers: Makers, prompt: Sequence[int], length: int) -> int:
    """Bytes of keys and values that a token sees at `length`; a short run tells a row's bytes."""
    cache = makers.ours()
    generate(Side(makers.model, lambda: cache), prompt, 2, len(prompt))
    return bytes_seen(cache, length)


def _speed(
    report: Report, runs: list[list[Generation]], steps: list[list[tuple[float, float]]]
) -> None:
    columns: dict[str, tuple[list[list[float]], str]] = {
        "prefill tokens/s": (_each(runs, lambda run: run.prefill_rate), ".1f"),
        "decode tokens/s": (_each(runs, lambda run: run.decode_rate), ".2f"),
        "time to first token, ms": (_each(runs, lambda run: 1e3 * run.first), ".1f"),
        "host µs a decoded token": ([[1e6 * built for built, _ in side] for side in steps], ".0f"),
        "one decode step alone, ms": ([[1e3 * took for _, took in side] for side in steps], ".2f"),
    }
    rows = []
    for name, (samples, form) in columns.items():
        sides = [Spread.of(side) for side in samples]
        ratio = paired(*samples)
        report.results[name] = {
            **{label: side.as_dict() for label, side in zip(NAMES, sides, strict=True)},
            "paired_ratio": ratio.as_dict(),
        }
        rows.append(
            [
                name,
                *(side.extremes(form) for side in sides),
                ratio.quartiles(".3f"),
                str(ratio.count),
            ]
        )
    report.table(
        "Speed: median (minimum-maximum); ratio of pairs: median [quartiles]",
        ["", OURS, THEIRS, f"{OURS} / {THEIRS}", "pairs"],
        rows,
    )
    _noise(report, columns["decode tokens/s"][0])


def _noise(report: Report, rates: list[list[float]]) -> None:
    """How far the same cache differs from itself between one generation and its next."""
    ratios = [after / before for side in rates for before, after in pairwise(side)]
    if ratios:
        spread = Spread.of(ratios)
        report.results["decode noise"] = spread.as_dict()
        report.note(
            "Noise: decode tokens/s of a cache against its own previous generation: "
            f"{spread.quartiles('.3f')}, extremes {spread.minimum:.3f}-{spread.maximum:.3f}."
        )


def _memory(report: Report, runs: list[list[Generation]]) -> None:
    last = [side[-1] for side in runs]
    peaks = [max(run.peak for run in side) for side in runs]
    figures = {
        "KV bytes allocated": [run.held.allocated for run in last],
        "KV bytes used": [run.held.used for run in last],
        "peak memory, weights included": peaks,
    }
    report.results["memory"] = {
        name: dict(zip(NAMES, values, strict=True)) for name, values in figures.items()
    }
    report.table(
        "Memory",
        ["", OURS, THEIRS, f"{OURS} / {THEIRS}"],
        [
            [name, mebibytes(ours), mebibytes(theirs), f"{ours / theirs:.3f}"]
            for name, (ours, theirs) in figures.items()
        ],
    )


def _bandwidth(
    report: Report, runs: list[list[Generation]], weights: int | None, kv_read: int
) -> None:
    if weights is None:
        report.results["achieved_gb_per_s"] = None
        report.note("Achieved GB/s is not computed: a mixture of experts reads a varying part.")
        return
    rates = [Spread.of([run.decode_rate for run in side]) for side in runs]
    achieved = [rate.scaled((weights + kv_read) / 1e9) for rate in rates]
    report.results["achieved_gb_per_s"] = {
        "weight_bytes_a_token": weights,
        "kv_bytes_a_token": kv_read,
        **{name: side.as_dict() for name, side in zip(NAMES, achieved, strict=True)},
    }
    report.table(
        "Achieved GB/s: (weight bytes + KV bytes that a token sees half-way) x decode tokens/s",
        ["weights a token", "KV a token", *NAMES],
        [[mebibytes(weights), mebibytes(kv_read), *(side.extremes() for side in achieved)]],
    )


def _agreement(report: Report, runs: list[list[Generation]]) -> None:
    answers = {run.tokens for side in runs for run in side}
    same = len(answers) == 1
    report.results["identical_tokens"] = same
    report.results["tokens"] = [list(side[0].tokens) for side in runs]
    count = len(runs[0][0].tokens)
    report.note(
        f"Generated tokens: all {count} identical in every generation of both caches."
        if same
        else f"Generated tokens DIFFER: {len(answers)} different answers of {count} tokens.",
        style="" if same else "bold red",
    )


def _each(runs: list[list[Generation]], figure: Callable[[Generation], float]) -> list[list[float]]:
    return [[figure(run) for run in side] for side in runs]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--windows takes integers, got {text!r}") from None


app: Any = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command(epilog=_EXAMPLES)(main)

if __name__ == "__main__":
    app()
