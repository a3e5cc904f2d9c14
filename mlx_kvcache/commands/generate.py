"""`mlx-kvcache generate`: stream a model's answer, produced on our cache."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_kvcache.commands.console import INTERRUPTED, print_note, write_json
from mlx_kvcache.commands.flags import (
    DEFAULT_MODEL,
    Capacity,
    KVDtype,
    ModelName,
    PrefillStep,
    Seed,
    Spare,
    SystemPrompt,
    Temperature,
    TopP,
    WeightsDtype,
    Windows,
)
from mlx_kvcache.commands.options import RunOptions, parse_windows, read_prompt
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY

if TYPE_CHECKING:
    from mlx_kvcache.chat.generation import Generation

DEFAULT_MAX_TOKENS = 256


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; '-', or nothing when input is piped, reads standard input.",
            show_default=False,
        ),
    ] = None,
    model: ModelName = DEFAULT_MODEL,
    max_tokens: Annotated[
        int, typer.Option(help="The most tokens to produce.")
    ] = DEFAULT_MAX_TOKENS,
    temp: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: SystemPrompt = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    dtype: WeightsDtype = None,
    capacity: Capacity = None,
    kv_dtype: KVDtype = None,
    initial_capacity: Annotated[
        int | None,
        typer.Option(
            help="Rows with which full-attention layers start; they double from there. "
            f"[default: {DEFAULT_INITIAL_CAPACITY}; all rows at once where the prompt is longer "
            "than --max-tokens]",
            show_default=False,
        ),
    ] = None,
    spare: Spare = None,
    windows: Windows = None,
    prefill_step: PrefillStep = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object with the answer and all figures."),
    ] = False,
) -> None:
    """Generate text with a Hugging Face model on this package's cache.

    The answer alone goes to standard output; progress and figures go to standard error.

    Examples:

    ```sh
    mlx-kvcache generate "What is the capital of France?"
    mlx-kvcache generate --raw "The capital of France is" --max-tokens 8
    mlx-kvcache generate --model gemma3-270m --raw --temp 0.8 "Once upon a"
    mlx-kvcache generate --model org/model --capacity 8192 < prompt.txt
    mlx-kvcache generate "Name three rivers." --json | jq .speed
    ```
    """
    options = RunOptions(
        model=model,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        seed=seed,
        capacity=capacity,
        kv_dtype=kv_dtype,
        initial_capacity=initial_capacity,
        spare=spare,
        windows=parse_windows(windows),
        dtype=dtype,
        raw=raw,
        system=system,
        prefill_step=prefill_step,
    )
    generation = _prepare(options, read_prompt(prompt))
    if as_json:
        _run_as_json(generation, options)
    else:
        _run_streaming(generation)


def _prepare(options: RunOptions, prompt: str) -> Generation:
    """Load the model, and refuse what cannot fit before anything is computed."""
    from mlx_kvcache.chat import generation
    from mlx_kvcache.commands.loading import load_model
    from mlx_kvcache.integrations.mlx_lm import default_prefill_step
    from mlx_kvcache.integrations.sampling import Sampling

    model, tokenizer, choice = load_model(options)
    tokens = generation.prompt_tokens(tokenizer, prompt, options.system, options.raw)
    generation.check_room(len(tokens), options.max_tokens, choice)
    return generation.Generation(
        model,
        tokenizer,
        tokens,
        generation.make_cache(model, choice, len(tokens), options.max_tokens),
        options.max_tokens,
        Sampling(options.temp, options.top_p, options.seed),
        options.prefill_step or default_prefill_step(),
    )


def _run_streaming(generation: Generation) -> None:
    from mlx_kvcache.commands.generate_report import report_lines
    from mlx_kvcache.commands.prefill_bar import prefill_bar

    interrupted = False
    try:
        with prefill_bar() as generation.on_progress:
            for piece in generation.pieces():
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
        sys.stdout.write(generation.break_off())
    if generation.text and not generation.text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    for line in report_lines(generation):
        print_note(line, style="dim")
    if interrupted:
        _end_interrupted()


def _run_as_json(generation: Generation, options: RunOptions) -> None:
    from mlx_kvcache.commands.generate_report import report_facts
    from mlx_kvcache.commands.prefill_bar import prefill_bar

    interrupted = False
    try:
        with prefill_bar() as generation.on_progress:
            for _ in generation.pieces():
                pass
    except KeyboardInterrupt:
        interrupted = True
        generation.break_off()
        generation.finish_reason = "interrupted"
    write_json(report_facts(generation, options))
    if interrupted:
        _end_interrupted()


def _end_interrupted() -> None:
    print_note("interrupted", style="yellow")
    raise typer.Exit(INTERRUPTED)
