"""`mlx-kvcache batch`: many prompts at once, over one cache."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mlx_kvcache.commands.batch_input import (
    BatchOptions,
    Refusal,
    parse_lines,
    read_lines,
    refuse_first,
)
from mlx_kvcache.commands.batch_signals import Stop, stop_signals
from mlx_kvcache.commands.console import SYSTEM_ERROR, print_note
from mlx_kvcache.commands.flags import OUTPUT, PROMPT, flag
from mlx_kvcache.commands.options import with_flags

if TYPE_CHECKING:
    from mlx_kvcache.commands.batch_output import Results
    from mlx_kvcache.commands.batch_run import Batch
    from mlx_kvcache.engine import Request


@with_flags(BatchOptions)
def batch(
    options: BatchOptions,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="The prompts, one a line; '-', or nothing when input is piped, reads standard "
            "input.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        bool, flag("Every line is plain text, also one like JSON.", "--text", panel=PROMPT)
    ] = False,
    skip_invalid: Annotated[
        bool,
        flag(
            "Give lines that cannot be answered an error for a result, and answer the others.",
            "--skip-invalid",
            panel=PROMPT,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        flag(
            "Append each result to this new file as it finishes, not to standard output.",
            "--output",
            "-o",
            panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        flag("Replace the file of --output, with the first result.", "--overwrite", panel=OUTPUT),
    ] = False,
    resume: Annotated[
        bool,
        flag(
            "Go on with the file of --output: answer what it has no answer to.",
            "--resume",
            panel=OUTPUT,
        ),
    ] = False,
    unordered: Annotated[
        bool,
        flag(
            "Write results as they finish; those in a file always are.",
            "--unordered",
            panel=OUTPUT,
        ),
    ] = False,
    quiet: Annotated[
        bool, flag("Show no figures and no progress.", "--quiet", "-q", panel=OUTPUT)
    ] = False,
) -> None:
    """Answer many prompts at once: JSON lines in, JSON lines out, in input order.

    A line is plain text, a JSON string, or an object with "prompt" or "messages" and any of "id",
    "max_tokens", "temp", "top_p", "seed", "system" and the other options of one answer. With
    --seed S, line n has the seed S + n - 1. What was finished is written before Ctrl-C or another
    signal ends the run.

    Exit status: 0 all answered, 1 some failed or the system did, 2 a wrong request, 130 Ctrl-C,
    141 the reader is gone, 143 SIGTERM, 129 SIGHUP.

    Examples:

    ```sh
    mlx-kvcache batch prompts.jsonl --sessions 16 --output results.jsonl
    mlx-kvcache batch prompts.jsonl --sessions 16 --output results.jsonl --resume
    printf 'Name a river.\\nName a sea.\\n' | mlx-kvcache batch --max-tokens 32
    mlx-kvcache batch questions.txt --system "Answer in one word." --share-prefix
    ```
    """
    from mlx_kvcache.commands.batch_output import results_of
    from mlx_kvcache.commands.batch_report import report_lines
    from mlx_kvcache.commands.batch_resume import claimed
    from mlx_kvcache.commands.batch_run import prepare
    from mlx_kvcache.models.progress import answering

    with claimed(output, file, overwrite, resume) as claim:
        prompts, refusals = parse_lines(read_lines(file), options, text)
        if not skip_invalid:
            refuse_first(refusals)
        kept = frozenset() if claim is None else claim.answered(prompts)
        left = [prompt for prompt in prompts if prompt.line not in kept]
        batch = None
        if left:
            batch, unfit = prepare(left, options)
            refusals += unfit
        if not skip_invalid:
            refuse_first(refusals)
        order = sorted({prompt.line for prompt in left} | {one.line for one in refusals})
        stopped = None
        if order:
            with stop_signals() as stop, results_of(claim, unordered, order) as results:
                _answer(batch, refusals, results, stop, _silent if quiet else answering)
                stopped = stop.signal
        if not quiet:
            for line in report_lines(batch, len(refusals), len(kept)):
                print_note(line, style="dim")
    if stopped is not None:
        _end_by(stopped, output)
    if refusals or (batch is not None and any(one.error is not None for one in batch.requests)):
        raise typer.Exit(SYSTEM_ERROR)


def _end_by(number: int, output: Path | None) -> NoReturn:
    """End as the signal asked. Raises `KeyboardInterrupt` or `typer.Exit`."""
    if output is not None and output.exists():
        print_note(f"output  {output} has what is finished; --resume goes on from there")
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    print_note("terminated", style="yellow")
    # What a shell gives for a process that a signal ended.
    raise typer.Exit(128 + number)


#: Shows how many answers of a total are done; see `models.progress.answering`.
Progress = Callable[[int], AbstractContextManager[Callable[[bool], None]]]


def _answer(
    batch: Batch | None,
    refusals: Sequence[Refusal],
    results: Results,
    stop: Stop,
    progress: Progress,
) -> None:
    """Write all results as they finish, until all have or the run is to stop."""
    from mlx_kvcache.commands.batch_output import refusal_line

    for refusal in sorted(refusals, key=lambda one: one.line):
        results.write(refusal.line, partial(refusal_line, refusal))
    if batch is not None:
        try:
            _run(batch, results, stop, progress)
        except KeyboardInterrupt:
            stop.signal = signal.SIGINT
        for request in batch.finished():
            _write(batch, request, results)
    results.finish()


def _run(batch: Batch, results: Results, stop: Stop, progress: Progress) -> None:
    with progress(len(batch.requests)) as advance:
        for events in batch.run():
            for request, is_over in events:
                advance(is_over)
                if is_over:
                    _write(batch, request, results)
            if stop.signal is not None:
                return


@contextmanager
def _silent(_total: int) -> Iterator[Callable[[bool], None]]:
    """In place of a progress bar."""
    yield lambda _ended: None


def _write(batch: Batch, request: Request, results: Results) -> None:
    results.write(batch.line(request), partial(batch.result, request))
