"""The bar of a long prefill, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlx_kvcache.commands.console import stderr_console
from mlx_kvcache.generation import Generation

#: Shorter prompts are read before a bar could be.
LONG_PROMPT = 256


@contextmanager
def prefill_bar(generation: Generation) -> Iterator[None]:
    """While this is open, `generation` shows how much of a long prompt it has read.

    Nothing is shown for a short prompt or where stderr is no terminal. The bar vanishes before
    the first piece of the answer is written.
    """
    console = stderr_console()
    if not console.is_terminal or len(generation.prompt) < LONG_PROMPT:
        yield
        return
    columns = (
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("prefill", total=len(generation.prompt))

        def advance(processed: int, total: int) -> None:
            progress.update(task, completed=processed)
            if processed == total:
                progress.stop()

        generation.on_progress = advance
        yield
