"""`mlx-kvcache generate`: stream a model's answer, produced on our cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_kvcache.commands.console import decoded, print_note, write_json
from mlx_kvcache.commands.loading import Loaded, load
from mlx_kvcache.commands.options import SequenceOptions, with_flags
from mlx_kvcache.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from mlx_kvcache.chat.generation import Generation
    from mlx_kvcache.integrations.mlx_lm import PromptCache


@with_flags(SequenceOptions)
def generate(
    options: SequenceOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; '-', or nothing when input is piped, reads standard input.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object with the answer and all figures."),
    ] = False,
) -> None:
    """Generate text with a Hugging Face model on this package's cache.

    The answer alone goes to standard output; progress and figures go to standard error. The
    cache of a prompt that is longer than --max-tokens is allocated at once, unless
    --initial-capacity is given.

    Examples:

    ```sh
    mlx-kvcache generate "What is the capital of France?"
    mlx-kvcache generate --raw "The capital of France is" --max-tokens 8
    mlx-kvcache generate --model gemma3-270m --raw --temp 0.8 "Once upon a"
    mlx-kvcache generate --model org/model --capacity 8192 < prompt.txt
    mlx-kvcache generate "Name three rivers." --json | jq .speed
    ```
    """
    from mlx_kvcache.commands.generate_report import report_facts, report_lines

    generation = _prepare(options, read_prompt(prompt))
    interrupted = _run(generation, _ignore if as_json else _write)
    if as_json:
        write_json(report_facts(generation, options))
    else:
        if generation.text and not generation.text.endswith("\n"):
            _write("\n")
        for line in report_lines(generation):
            print_note(line, style="dim")
    if interrupted:
        raise KeyboardInterrupt


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or standard input when that is "-" or absent and input is piped.

    The line end that closes piped input is not part of it. Raises `ConfigError` when there is no
    prompt, when it is empty, or when it is not UTF-8.
    """
    if argument is None and sys.stdin.isatty():
        raise ConfigError(
            "there is no prompt; give one as the argument, or pipe one into standard input"
        )
    prompt = argument
    if prompt is None or prompt == "-":
        text = decoded(sys.stdin.buffer.read(), "standard input")
        prompt = text.removesuffix("\n").removesuffix("\r")
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give some text to continue or to answer")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt is not valid UTF-8; give it as UTF-8 text") from error
    return prompt


def _prepare(options: SequenceOptions, prompt: str) -> Generation:
    """Load the model, and refuse what cannot fit before anything is computed."""
    from mlx_kvcache.chat.generation import Generation
    from mlx_kvcache.chat.text import chat_script
    from mlx_kvcache.integrations.mlx_lm import default_prefill_step

    loaded = load(options)
    script = chat_script(loaded.tokenizer, options.system, options.raw)
    tokens = script.write([], [], prompt)
    _check_room(len(tokens), options, loaded)
    cache = loaded.prompt_cache(options)
    _reserve(cache, len(tokens), options)
    return Generation(
        loaded.model,
        loaded.tokenizer,
        tokens,
        cache,
        options.max_tokens,
        script.stop_tokens,
        options.sampling,
        options.prefill_step or default_prefill_step(),
    )


def _check_room(prompt_count: int, options: SequenceOptions, loaded: Loaded) -> None:
    """Raise `CapacityError` unless the prompt and the whole answer fit into the capacity."""
    capacity, total = loaded.capacity(options), prompt_count + options.max_tokens
    if capacity is not None and total > capacity:
        room = capacity - prompt_count
        less = f"lower --max-tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise CapacityError(
            f"{prompt_count} prompt tokens and {options.max_tokens} new ones (--max-tokens) need "
            f"{total} positions, but the capacity is {capacity}"
            f"{loaded.capacity_source(options)}; {less}, or raise --capacity to {total}"
        )


def _reserve(cache: PromptCache, prompt_count: int, options: SequenceOptions) -> None:
    """Allocate the rows of the whole answer at once where that is known to pay."""
    # Growth by doubling holds up to twice the rows it needs. An answer no longer than its prompt
    # stays within that, so reserving both saves every copy and costs no memory. A longer one
    # often ends early, and its rows would have been allocated for nothing. Whoever sets where
    # growth begins wants it to grow from there.
    if options.initial_capacity is None and options.max_tokens <= prompt_count:
        cache.sequence.reserve(prompt_count + options.max_tokens)


def _run(generation: Generation, show: Callable[[str], None]) -> bool:
    """Make the answer; whether it was interrupted."""
    from mlx_kvcache.models.progress import reading_prompt

    try:
        with reading_prompt() as generation.on_progress:
            for piece in generation.pieces():
                show(piece)
    except KeyboardInterrupt:
        show(generation.break_off())
        generation.finish_reason = "interrupted"
        return True
    return False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    pass
