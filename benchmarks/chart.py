"""Draw the README's chart from what `cache_steps.py --only flat --only ring --json FILE` wrote.

One pair of bars for each kind of decode step: what the host pays a layer, here and in mlx-lm. The
lines on the bars reach from quartile to quartile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from common import NAMES
from pictures import COLORS, chart

_EXAMPLES = """
Examples:

  python benchmarks/cache_steps.py --only flat --only ring --json steps.json

  python benchmarks/chart.py steps.json docs/images/host_time.svg
"""
_BAR = 0.38


def main(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The JSON file.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write (.svg or .png).")],
) -> None:
    """Draw host time a layer of a decode step, both caches beside each other."""
    found = json.loads(results.read_text(encoding="utf-8"))
    if found.get("benchmark") != "cache_steps":
        raise typer.BadParameter(f"{results} was not written by cache_steps.py")
    phases = [phase for kind in ("flat", "ring") for phase in found["results"].get(kind, ())]
    if not phases:
        raise typer.BadParameter(f"{results} has no flat and no ring steps")
    draw(phases, found["machine"], picture)


def draw(phases: list[dict[str, Any]], machine: dict[str, Any], picture: Path) -> None:
    """Write the chart of these phases, as `Phase.as_dict` gives them."""
    with chart(picture, (7.5, 2.2 + 0.5 * len(phases)), machine) as axes:
        for number, phase in enumerate(phases):
            for side, name in enumerate(NAMES):
                spread = phase["host_us_per_layer"][name]
                low, middle, high = spread["lower"], spread["median"], spread["upper"]
                place = number + (side - 0.5) * _BAR
                label = name if not number else None
                axes.barh(place, middle, _BAR, color=COLORS[name], label=label)
                axes.plot([low, high], [place, place], color="black", linewidth=1.2)
                axes.text(high, place, f"  {middle:.1f}", va="center", fontsize=9)
        ratios = [phase["host_ratio"]["median"] for phase in phases]
        names = [phase["name"] for phase in phases]
        axes.set_yticks(
            range(len(phases)),
            [f"{name}\n{ratio:.2f} of mlx-lm" for name, ratio in zip(names, ratios, strict=True)],
        )
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("host microseconds a layer of a decode step (less is better)")
        axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=_EXAMPLES)(main)
    app()
