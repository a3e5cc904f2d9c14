"""`mlx-kvcache batch`: many prompts at once, over one cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_kvcache.commands.batch_input import BatchOptions, parse_prompts, read_lines
from mlx_kvcache.commands.console import SYSTEM_ERROR, print_note
from mlx_kvcache.commands.options import with_flags

if TYPE_CHECKING:
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
        bool, typer.Option("--text", help="Every line is plain text, also one like JSON.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the results to this file, at once at the end, not to standard output.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file of --output.")
    ] = False,
) -> None:
    """Answer many prompts at once: JSON lines in, JSON lines out, in input order.

    A line is plain text, a JSON string, or an object with "prompt" and any of "id", "max_tokens",
    "temp", "top_p", "seed", "system". With --seed S, line n has the seed S + n - 1. After Ctrl-C
    the results that were finished are still written.

    Examples:

    ```sh
    mlx-kvcache batch prompts.jsonl --sessions 16 --output results.jsonl
    printf 'Name a river.\\nName a sea.\\n' | mlx-kvcache batch --max-tokens 32
    mlx-kvcache batch questions.txt --system "Answer in one word." --share-prefix
    ```
    """
    from mlx_kvcache.commands.batch_output import InOrder, check_output, report_lines, write_file
    from mlx_kvcache.commands.batch_run import prepare
    from mlx_kvcache.models.progress import answering

    check_output(output, overwrite)
    prompts = parse_prompts(read_lines(file), options, text)
    batch = prepare(prompts, options)
    in_order = InOrder(batch) if output is None else None
    owned = set(batch.requests)
    interrupted = False
    try:
        with answering(len(prompts)) as advance:

            def on_event(request: Request, ended: bool) -> None:
                if request in owned:
                    advance(ended)
                if ended and in_order is not None:
                    in_order.advance()

            batch.run(on_event)
    except KeyboardInterrupt:
        interrupted = True
    if in_order is not None:
        in_order.finish()
    elif output is not None:
        write_file(batch, output)
    for line in report_lines(batch):
        print_note(line, style="dim")
    if interrupted:
        raise KeyboardInterrupt
    if any(request.error is not None for request in batch.requests):
        raise typer.Exit(SYSTEM_ERROR)
