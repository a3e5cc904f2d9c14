"""Many sequences at once: our engine with both caches against mlx-lm's BatchGenerator, in turns.

Tokens a second and memory by batch size, with and without a common prefix; what a fork costs. See
README.md beside this file.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from common import Machine, Spread, turns
from report import JSONFile, MarkdownFlag, Report, mebibytes, require_directory
from rich.console import Console
from rich.progress import track
from session_runs import Fork, Rows, Run, Work, make_work, our_engine, our_fork, ours, their_fork
from session_runs import theirs as run_theirs

from mlx_kvcache.errors import KVCacheError

_EXAMPLES = """
Examples:

  python benchmarks/sessions.py --quick

  python benchmarks/sessions.py --model smollm2 --batches 1,8,32 --markdown

  python benchmarks/sessions.py --model gemma3-270m --prefix-tokens 1024 --json sessions.json
"""
_NAMES = ("cell", "batched", "BatchGenerator")


def main(
    model: Annotated[
        str, typer.Option(help="A demo's name, a hub id, a directory or a .gguf file.")
    ] = "smollm2",
    batches: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,2,4,8,16,32",
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of a prompt, on average; they differ in length.")
    ] = 64,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the common prefix.")] = 512,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens to generate.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
    step_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of one step.")] = 512,
    fork_tokens: Annotated[str, typer.Option(help="Lengths to fork at.")] = "512,4096",
    dtype: Annotated[str | None, typer.Option(help="Of the weights. Default: as loaded.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few short runs, to see that all works.")
    ] = False,
    markdown: MarkdownFlag = False,
    json: JSONFile = None,
) -> None:
    """Time many sequences at once on our engine and on mlx-lm's, in turns."""
    from mlx_kvcache.models import load

    require_directory(json)
    if quick:
        batches, prompt_tokens, prefix_tokens, tokens, repeats = "1,4", 8, 16, 8, 1
        fork_tokens = "512"
    sizes, lengths = _numbers("--batches", batches), _numbers("--fork-tokens", fork_tokens)
    settings = {
        "model": model, "batches": batches, "prompt_tokens": prompt_tokens,
        "prefix_tokens": prefix_tokens, "tokens": tokens, "repeats": repeats,
        "step_tokens": step_tokens, "dtype": dtype or "as loaded",
    }  # fmt: skip
    try:
        network, tokenizer = load(model, dtype=dtype)
        report = Report("sessions", Machine.here(), settings, markdown)
        report.header()
        engines = [our_engine(network, kind) for kind in _NAMES[:2]]
        rows = _rows(engines[0](make_work(tokenizer, 1, 2, 1, 0, step_tokens)).cache.geometry)
        for prefix in (0, prefix_tokens):
            works = [
                make_work(tokenizer, size, prompt_tokens, tokens, prefix, step_tokens)
                for size in sizes
            ]
            _compare(report, network, engines, works, repeats)
        _forks(report, rows, lengths, repeats)
    except KVCacheError as error:
        raise typer.BadParameter(str(error)) from error
    if json is not None:
        report.write(json)


def _compare(
    report: Report, network: Any, engines: list[Any], works: list[Work], repeats: int
) -> None:
    title = f"{len(works[0].prefix)} common tokens" if works[0].prefix else "nothing in common"
    console = Console(stderr=True)
    rows = []
    results: list[dict[str, Any]] = []
    for work in track(
        works, title, console=console, disable=not console.is_terminal, transient=True
    ):
        runs: list[list[Run]] = [[], [], []]
        for order in turns(repeats, 3):
            for side in order:
                run = ours(engines[side], work) if side < 2 else run_theirs(network, work)
                runs[side].append(run)
        rows += _rows_of(len(work.prompts), runs)
        results.append(_facts(len(work.prompts), runs))
    report.table(
        f"Tokens a second and memory, {title}",
        ("sequences", "cache", "decode tokens/s", "against", "with prompts, tokens/s",
         "peak bytes over the weights", "same tokens"),
        rows,
    )  # fmt: skip
    report.results[title] = results


def _rows_of(size: int, runs: list[list[Run]]) -> list[tuple[str, ...]]:
    theirs = Spread.of([run.decode_rate for run in runs[2]]).median
    rows = []
    for name, side in zip(_NAMES, runs, strict=True):
        decode = Spread.of([run.decode_rate for run in side])
        whole = Spread.of([run.whole_rate for run in side])
        same = sum(
            mine == other
            for run, their in zip(side, runs[2], strict=True)
            for mine, other in zip(run.answers, their.answers, strict=True)
        )
        rows.append(
            (
                str(size),
                name,
                decode.extremes(".1f"),
                f"{decode.median / theirs:.2f}x",
                whole.extremes(".1f"),
                mebibytes(max(run.peak for run in side)),
                f"{same}/{size * len(side)}",
            )
        )
    return rows


def _facts(size: int, runs: list[list[Run]]) -> dict[str, Any]:
    return {
        "sequences": size,
        **{
            name: {
                "decode_tokens_per_second": [run.decode_rate for run in side],
                "whole_tokens_per_second": [run.whole_rate for run in side],
                "peak_bytes": [run.peak for run in side],
                "same_tokens": [run.answers == runs[2][0].answers for run in side],
            }
            for name, side in zip(_NAMES, runs, strict=True)
        },
    }


def _forks(report: Report, rows: Rows, lengths: list[int], repeats: int) -> None:
    table = []
    for length in lengths:
        forks: list[list[Fork]] = [[], [], []]
        for order in turns(max(repeats, 3), 3):
            for side in order:
                fork = our_fork(rows, _NAMES[side], length) if side < 2 else None
                forks[side].append(fork or their_fork(rows, length))
        for name, side in zip((*_NAMES[:2], "copy.deepcopy"), forks, strict=True):
            seconds = Spread.of([1e6 * fork.seconds for fork in side])
            table.append(
                (
                    f"{length}",
                    name,
                    seconds.extremes(".0f"),
                    mebibytes(max(fork.taken for fork in side)),
                    mebibytes(max(fork.written for fork in side)),
                )
            )
    report.table(
        f"A fork of one sequence: {rows.layers} flat layers, {rows.heads} heads of {rows.dim}, "
        "float16",
        ("positions", "cache", "µs", "bytes taken", "after one more token in both"),
        table,
    )
    report.results["forks"] = table


def _rows(geometry: Any) -> Rows:
    first = geometry.layers[0]
    return Rows(len(geometry.layers), first.kv_heads, first.key_dim)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{flag} takes integers separated by commas: {text}") from error
    if min(numbers) < 1:
        raise typer.BadParameter(f"{flag} takes numbers from 1 on: {text}")
    return numbers


app: Any = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command(epilog=_EXAMPLES)(main)

if __name__ == "__main__":
    app()
