"""The bar of a long prefill, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from mlx_kvcache.commands.console import stderr_console

#: Shorter prompts are read before a bar could be.
LONG_PROMPT = 256


@contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What to call with the tokens read and their total; it shows how much of a prompt is read.

    Nothing is shown for a short prompt, and there is nothing to call where stderr is no terminal.
    The bar vanishes when all is read, before the first piece of the answer is written.
    """
    console = stderr_console()
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    tasks: list[TaskID] = []

    def advance(processed: int, total: int) -> None:
        if not tasks:
            if total < LONG_PROMPT:
                return
            tasks.append(progress.add_task("prefill", total=total))
            progress.start()
        progress.update(tasks[0], completed=processed)
        if processed == total:
            progress.stop()

    try:
        yield advance
    finally:
        if tasks:
            progress.stop()
