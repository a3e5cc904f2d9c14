"""What long work shows on stderr: a bar on a terminal, which vanishes when the work is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

#: Shorter prompts are read before a bar could be.
LONG_PROMPT = 256


@contextmanager
def showing(description: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Announce work; call what this yields once for each of the `total` parts.

    With no total the bar only shows that the work goes on. Without a terminal there is one plain
    line.
    """
    if not sys.stderr.isatty():
        print(f"{description} ...", file=sys.stderr, flush=True)
        yield lambda: None
        return
    with _bar(SpinnerColumn(), TextColumn("{task.description}"), BarColumn()) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Say on a terminal, while this is open, that a model is being loaded; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield
        return
    with _bar(SpinnerColumn(), TextColumn("{task.description}")) as bar:
        bar.add_task(f"Loading {name} ...", total=None)
        yield


@contextmanager
def reading_prompt() -> Iterator[Callable[[int, int], None] | None]:
    """What to call with the tokens read and their total; None where there is no terminal.

    Nothing is shown for a short prompt. The bar vanishes when all is read, before the first piece
    of the answer is written.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bar = _bar(TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn())
    tasks: list[TaskID] = []

    def advance(processed: int, total: int) -> None:
        if not tasks:
            if total < LONG_PROMPT:
                return
            tasks.append(bar.add_task("", total=total))
            bar.start()
        bar.update(tasks[0], completed=processed)
        if processed == total:
            bar.stop()

    try:
        yield advance
    finally:
        if tasks:
            bar.stop()


@contextmanager
def answering(total: int) -> Iterator[Callable[[bool], None]]:
    """What to call for each token, saying whether it ended one of the `total` answers.

    Shows the answers done and the tokens a second.
    """
    if not sys.stderr.isatty():
        yield lambda _ended: None
        return
    rate = TextColumn("{task.fields[rate]:.1f} tokens/s")
    with _bar(TextColumn("answering"), BarColumn(), MofNCompleteColumn(), rate) as bar:
        task = bar.add_task("", total=total, rate=0.0)
        began = time.perf_counter()
        tokens = 0

        def advance(ended: bool) -> None:
            nonlocal tokens
            tokens += 1
            seconds = max(time.perf_counter() - began, 1e-9)
            bar.update(task, advance=int(ended), rate=tokens / seconds)

        yield advance


def _bar(*columns: ProgressColumn) -> Progress:
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        # On one terminal what is written comes above the bar; elsewhere it goes its own way.
        redirect_stdout=sys.stdout.isatty(),
    )
