"""What the charts of the benchmarks have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from common import NAMES

#: By contender, in the order of every table.
COLORS = dict(zip(NAMES, ("#2563eb", "#a3a3a3"), strict=True))


@contextmanager
def chart(path: Path, size: tuple[float, float], machine: dict[str, Any]) -> Iterator[Any]:
    """Axes to draw on, under a line that names the machine; written to `path` at the end.

    machine: as `Machine.as_dict` gives it.
    """
    matplotlib.use("Agg")
    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.stem})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    yield axes
    axes.set_title(_where(machine), fontsize=8, color="#525252", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _where(machine: dict[str, Any]) -> str:
    kind = "Metal" if machine["metal"] else "CPU figures, not Metal"
    load = "" if machine["load"] is None else f", load {machine['load']:.2f}"
    return (
        f"{kind}: {machine['cpu']}, {machine['cores']} cores{load}; "
        f"mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}"
    )
