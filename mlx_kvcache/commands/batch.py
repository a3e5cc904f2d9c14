"""`mlx-kvcache batch`: many prompts at once, over one cache."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_kvcache.commands.console import INTERRUPTED, SYSTEM_ERROR, print_note
from mlx_kvcache.commands.flags import (
    DEFAULT_MODEL,
    KVDtype,
    ModelName,
    Seed,
    Spare,
    SystemPrompt,
    Temperature,
    TopP,
    WeightsDtype,
    Windows,
)
from mlx_kvcache.commands.options import RunOptions, parse_windows
from mlx_kvcache.errors import ConfigError

if TYPE_CHECKING:
    from mlx_kvcache.commands.batch_input import Prompt
    from mlx_kvcache.engine import Request

DEFAULT_MAX_TOKENS = 256
DEFAULT_SESSIONS = 8


class Kind(str, Enum):
    """The cache."""

    CELL = "cell"
    BATCHED = "batched"


def batch(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="The prompts, one a line; '-', or nothing when input is piped, reads standard "
            "input.",
            show_default=False,
        ),
    ] = None,
    model: ModelName = DEFAULT_MODEL,
    sessions: Annotated[
        int, typer.Option(help="The most prompts that are answered at once.")
    ] = DEFAULT_SESSIONS,
    cache: Annotated[
        Kind,
        typer.Option(
            help="cell: one pool of rows, common beginnings held once. batched: rows of its own "
            "for each prompt, sliding windows as real rings."
        ),
    ] = Kind.CELL,
    max_tokens: Annotated[
        int, typer.Option(help="The most tokens to produce for a prompt that does not say.")
    ] = DEFAULT_MAX_TOKENS,
    temp: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: SystemPrompt = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as they are, without chat template.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Every line is plain text, also one like JSON.")
    ] = False,
    share_prefix: Annotated[
        bool,
        typer.Option(
            "--share-prefix", help="Read what all prompts begin with once, and fork from there."
        ),
    ] = False,
    capacity: Annotated[
        int | None,
        typer.Option(
            help="The most positions that all sessions hold together. [default: enough for the "
            "largest prompts at once]",
            show_default=False,
        ),
    ] = None,
    prefill_budget: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of one step; what decoding leaves of it goes to prompts. "
            "[default: 2048 on a GPU, 256 on a CPU]",
            show_default=False,
        ),
    ] = None,
    kv_dtype: KVDtype = None,
    spare: Spare = None,
    windows: Windows = None,
    dtype: WeightsDtype = None,
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
    from mlx_kvcache.commands.batch_input import parse_prompts, read_lines
    from mlx_kvcache.commands.batch_output import check_output

    options = RunOptions(
        model=model,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        seed=seed,
        capacity=capacity,
        kv_dtype=kv_dtype,
        spare=spare,
        windows=parse_windows(windows),
        dtype=dtype,
        raw=raw,
        system=system,
        prefill_step=prefill_budget,
    )
    if sessions < 1:
        raise ConfigError(f"--sessions must be at least 1, got {sessions}")
    if prefill_budget is not None and prefill_budget < sessions:
        raise ConfigError(
            f"--prefill-budget {prefill_budget} is less than one token for each of {sessions} "
            "sessions; raise it, or lower --sessions"
        )
    check_output(output, overwrite)
    prompts = parse_prompts(read_lines(file), options, text)
    _run(prompts, options, sessions, cache.value, share_prefix, output)


def _run(
    prompts: list[Prompt],
    options: RunOptions,
    sessions: int,
    kind: str,
    share_prefix: bool,
    output: Path | None,
) -> None:
    from mlx_kvcache.commands.batch_output import InOrder, progress_bar, report_lines, write_file
    from mlx_kvcache.commands.batch_run import BatchChoice, prepare
    from mlx_kvcache.integrations.mlx_lm import default_prefill_step

    step_tokens = options.prefill_step or max(default_prefill_step(), sessions)
    batch = prepare(prompts, options, BatchChoice(sessions, kind, step_tokens, share_prefix))
    in_order = InOrder(batch) if output is None else None
    interrupted = False
    try:
        with progress_bar(len(prompts)) as advance:

            def on_event(request: Request, ended: bool) -> None:
                if request in owned:
                    advance(request, ended)
                if ended and in_order is not None:
                    in_order.advance()

            owned = set(batch.requests)
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
        print_note("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED)
    if any(request.error is not None for request in batch.requests):
        raise typer.Exit(SYSTEM_ERROR)
