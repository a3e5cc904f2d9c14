"""`mlx-kvcache generate`: stream a model's answer, produced on our cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_kvcache.commands.console import decoded, print_note, write_json
from mlx_kvcache.commands.flags import OUTPUT, PROMPT, check_integer, check_text, flag
from mlx_kvcache.commands.loading import Loaded, load
from mlx_kvcache.commands.named_files import read_named
from mlx_kvcache.commands.options import SequenceOptions, with_flags
from mlx_kvcache.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from mlx_kvcache.chat.generation import Generation, Progress
    from mlx_kvcache.integrations.mlx_lm import PromptCache

#: More of the likeliest tokens than anybody reads.
MAX_LOGPROBS = 100


@dataclass(frozen=True)
class GenerateOptions(SequenceOptions):
    """The options of `generate`: what is shown of the one answer."""

    as_json: Annotated[
        bool, flag("Write one JSON object with the answer and all figures.", "--json", panel=OUTPUT)
    ] = False
    logprobs: Annotated[
        int | None,
        flag(
            "Under --json, the log-probability of each token and of this many of the likeliest.",
            metavar="N",
            panel=OUTPUT,
        ),
    ] = None
    quiet: Annotated[
        bool,
        flag("Show the answer alone: no figures, no progress.", "--quiet", "-q", panel=OUTPUT),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("--logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logprobs is not None and not self.as_json:
            raise ConfigError("--logprobs are part of --json; give that too, or leave them out")


@with_flags(GenerateOptions)
def generate(
    options: GenerateOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; '-', or nothing when input is piped, reads standard input.",
            show_default=False,
        ),
    ] = None,
    prompt_option: Annotated[
        str | None, flag("The prompt, as an option.", "--prompt", "-p", panel=PROMPT)
    ] = None,
    file: Annotated[
        str | None,
        flag(
            "Read the prompt from this file; '-' is standard input.", "--file", "-f", panel=PROMPT
        ),
    ] = None,
) -> None:
    """Generate text with a Hugging Face model on this package's cache.

    The answer alone goes to standard output; progress and figures go to standard error. The
    cache of a prompt that is longer than --max-tokens is allocated at once, unless
    --initial-capacity is given.

    Examples:

    ```sh
    mlx-kvcache generate "What is the capital of France?"
    mlx-kvcache generate --raw "The capital of France is" --stop .
    mlx-kvcache generate -m gemma3-270m --raw "Once upon a" --temp 0.8 --top-k 40
    mlx-kvcache generate -m gemma3-270m --raw "1, 2, 3," --windows 16 --spare 8 --max-tokens 64
    mlx-kvcache generate --model org/model --capacity 8192 --quiet --file prompt.txt
    mlx-kvcache generate "Name three rivers." --json --logprobs 3 | jq .speed
    ```
    """
    from mlx_kvcache.commands.generate_report import report_facts, report_lines

    generation = _prepare(options, read_prompt(prompt, prompt_option, file))
    interrupted = _run(generation, options)
    if options.as_json:
        write_json(report_facts(generation, options))
    elif generation.text and not generation.text.endswith("\n"):
        _write("\n")
    if not (options.as_json or options.quiet):
        for line in report_lines(generation):
            print_note(line, style="dim")
    if interrupted:
        raise KeyboardInterrupt


def read_prompt(
    argument: str | None, prompt_option: str | None = None, file: str | None = None
) -> str:
    """The prompt, from the one place where it is given.

    Without any of them, or as "-", it is standard input. The line end that closes a file is not
    part of it. Raises `ConfigError` when there is no prompt or more than one, when it is empty,
    or not UTF-8, or when there is no such file.
    """
    given = {"PROMPT": argument, "--prompt": prompt_option, "--file": file}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"the prompt is given by {' and '.join(named)}; leave one of them out")
    prompt = argument if prompt_option is None else prompt_option
    if file not in (None, "-"):
        prompt = _without_line_end(read_named(str(file), "the prompt"), str(file))
    elif prompt is None or prompt == "-":
        if not named and sys.stdin.isatty():
            raise ConfigError(
                "there is no prompt; give one as the argument, or pipe one into standard input"
            )
        prompt = _without_line_end(sys.stdin.buffer.read(), "standard input")
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give some text to continue or to answer")
    check_text("the prompt", prompt)
    return prompt


def _without_line_end(data: bytes, name: str) -> str:
    return decoded(data, name).removesuffix("\n").removesuffix("\r")


def _prepare(options: GenerateOptions, prompt: str) -> Generation:
    """Load the model, and refuse what cannot fit before anything is computed."""
    from mlx_kvcache.chat.generation import Generation
    from mlx_kvcache.chat.logprobs import Logprobs
    from mlx_kvcache.chat.text import chat_script
    from mlx_kvcache.integrations.mlx_lm import default_prefill_step

    loaded = load(options)
    script = chat_script(loaded.tokenizer, options.system, options.raw, options.template_args)
    tokens = script.write([], [], prompt, prefill=options.prefill_response or "")
    _check_room(len(tokens), options, loaded)
    cache = loaded.prompt_cache(options)
    _reserve(cache, len(tokens), options)
    return Generation(
        loaded.decoder(options, cache, _ignore if options.quiet else print_note),
        loaded.tokenizer,
        tokens,
        cache,
        options.max_tokens,
        script.stop_tokens,
        loaded.sampling(options),
        options.prefill_step or default_prefill_step(),
        stop_texts=options.stop_texts,
        logprobs=None if options.logprobs is None else Logprobs(options.logprobs),
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


def _run(generation: Generation, options: GenerateOptions) -> bool:
    """Make the answer; whether it was interrupted."""
    show = _ignore if options.as_json else _write
    try:
        with _progress(options) as generation.on_progress:
            for piece in generation.pieces():
                show(piece)
    except KeyboardInterrupt:
        show(generation.break_off())
        generation.finish_reason = "interrupted"
        return True
    return False


@contextmanager
def _progress(options: GenerateOptions) -> Iterator[Progress | None]:
    from mlx_kvcache.models.progress import reading_prompt

    if options.quiet:
        yield None
        return
    with reading_prompt() as progress:
        yield progress


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    pass
