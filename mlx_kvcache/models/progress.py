"""What a long piece of work shows: a bar on a terminal, one plain line anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[], None]


@contextmanager
def showing(description: str, total: int | None = None) -> Iterator[Advance]:
    """Announce work on stderr; call what this yields once for each of the `total` parts.

    With no total the bar only shows that the work goes on. stdout is never written to.
    """
    if not sys.stderr.isatty():
        print(f"{description} ...", file=sys.stderr, flush=True)
        yield _nothing
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _nothing() -> None:
    pass
