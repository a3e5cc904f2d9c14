"""Decodes with a real model at several context lengths, on our cache and mlx-lm's own in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from common import NAMES, OURS, THEIRS, Machine, Spread, paired
from generation import Side, decode_steps, random_prompt
from model_caches import Makers
from pictures import COLORS, chart
from report import JSONFile, MarkdownFlag, Report, require_directory
from rich.console import Console
from rich.progress import track

from mlx_kvcache import compiled
from mlx_kvcache.errors import KVCacheError

CONTEXTS = [256, 1024, 4096, 8192]
#: Steps that do not count: those before a form is compiled, its trace, and its check.
WARM = 8
_EXAMPLES = """
Examples:

  python benchmarks/context_sweep.py --model smollm2 --json sweep.json --plot sweep.svg

  python benchmarks/context_sweep.py --model gemma3-270m --context 256 --context 1024 --no-compile
"""


def main(
    model: Annotated[
        str, typer.Option(help="A demo's name, a hub id, a directory or a .gguf file.")
    ] = "smollm2",
    context: Annotated[
        list[int] | None, typer.Option(min=2, help="Positions held at first. May be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Decode steps at each context.")] = 40,
    prefill_step: Annotated[int, typer.Option(min=1, help="Prompt tokens a chunk.")] = 512,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compiled decode steps on our side.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the random prompt.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw tokens a second (.svg or .png).", dir_okay=False)
    ] = None,
    markdown: MarkdownFlag = False,
    json: JSONFile = None,
) -> None:
    """Time decode steps at growing context lengths; the two sides alternate step by step."""
    from mlx_kvcache.models import load

    require_directory(json)
    require_directory(plot)
    contexts = sorted(context or CONTEXTS)
    settings: dict[str, Any] = {
        "model": model, "contexts": contexts, "tokens": tokens, "prefill_step": prefill_step,
        "compile": compile, "seed": seed,
    }  # fmt: skip
    report = Report("context_sweep", Machine.here(), settings, markdown)
    report.header()
    try:
        network, tokenizer = load(model)
        makers = Makers(network)
        ours = compiled(network, typer.echo) if compile else network
        sides = (Side(ours, makers.ours), Side(network, makers.theirs))
        console = Console(stderr=True)
        rounds = track(
            contexts, "Decoding", console=console, disable=not console.is_terminal, transient=True
        )
        for length in rounds:
            prompt = random_prompt(tokenizer, length, seed)
            steps = decode_steps(sides, prompt, WARM + tokens, prefill_step)
            report.results[str(length)] = _figures([side[WARM:] for side in steps])
    except KVCacheError as error:
        raise typer.BadParameter(str(error)) from error
    _table(report)
    if plot is not None:
        _draw(report, model, plot)
    if json is not None:
        report.write(json)


def _figures(steps: list[list[tuple[float, float]]]) -> dict[str, Any]:
    host = [[1e6 * built for built, _ in side] for side in steps]
    rate = [[1 / took for _, took in side] for side in steps]
    return {
        kind: {
            **{name: Spread.of(side).as_dict() for name, side in zip(NAMES, sides, strict=True)},
            "paired_ratio": paired(*sides).as_dict(),
        }
        for kind, sides in (("host_us", host), ("tokens_per_second", rate))
    }


def _table(report: Report) -> None:
    rows = []
    for length, figures in report.results.items():
        rates, host = figures["tokens_per_second"], figures["host_us"]
        ratios = [Spread(**each["paired_ratio"]).quartiles(".3f") for each in (rates, host)]
        sides = [Spread(**rates[name]).extremes() for name in NAMES]
        rows.append([length, *sides, *ratios])
    report.table(
        "Decode steps, evaluated one by one: tokens a second, median (minimum-maximum); "
        "ratio of pairs: median [quartiles]",
        ["context", OURS, THEIRS, f"{OURS} / {THEIRS}", "host time, ratio"],
        rows,
    )


def _draw(report: Report, model: str, picture: Path) -> None:
    lengths = [int(length) for length in report.results]
    with chart(picture, (7.5, 3.6), report.machine.as_dict()) as axes:
        for name in NAMES:
            spreads = [each["tokens_per_second"][name] for each in report.results.values()]
            middle = [each["median"] for each in spreads]
            below = [each["median"] - each["lower"] for each in spreads]
            above = [each["upper"] - each["median"] for each in spreads]
            axes.errorbar(
                lengths, middle, yerr=[below, above], color=COLORS[name], marker="o", capsize=3,
                label=name,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("positions held")
        axes.set_ylabel(f"decode tokens a second, {model}")
        axes.legend(frameon=False)


app: Any = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command(epilog=_EXAMPLES)(main)

if __name__ == "__main__":
    app()
