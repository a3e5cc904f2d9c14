"""The options that the commands share: each declared once, as a flag, and checked once."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any

from mlx_kvcache.commands.flags import (
    ANSWER,
    CACHE,
    MODEL,
    PANELS,
    PROMPT,
    check_dtype,
    check_integer,
    check_text,
    flag,
)
from mlx_kvcache.commands.sampling_options import SamplingOptions
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import shortened
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY, DEFAULT_SPARE
from mlx_kvcache.facts.files import expanded
from mlx_kvcache.facts.json_text import read_json

_DTYPES = "float32, float16 or bfloat16"


@dataclass(frozen=True)
class RunOptions(SamplingOptions):
    """What was asked of the model, beside the prompt. None stands for a default of the model.

    Raises `ConfigError`, naming the flag and its value, for what cannot be.
    """

    model: Annotated[
        str,
        flag(
            "A demo (smollm2, gemma3-270m), a model directory, a .gguf file or a hub id.",
            "--model",
            "-m",
            panel=MODEL,
        ),
    ] = "smollm2"
    adapter_path: Annotated[
        str | None,
        flag("Directory of a trained adapter (LoRA, DoRA), as mlx-lm writes it.", panel=MODEL),
    ] = None
    dtype: Annotated[
        str | None,
        flag(
            f"Dtype of the weights: {_DTYPES}.",
            default="float32 on a CPU, else as stored",
            panel=MODEL,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        flag(
            "Run Python files that come with the model. They can do anything you can.",
            "--trust-remote-code",
            panel=MODEL,
        ),
    ] = False
    system: Annotated[
        str | None,
        flag("System prompt for the chat template.", "--system", "--system-prompt", panel=PROMPT),
    ] = None
    raw: Annotated[
        bool,
        flag(
            "Continue the text as it is, without chat template.",
            "--raw",
            "--ignore-chat-template",
            panel=PROMPT,
        ),
    ] = False
    prefill_response: Annotated[
        str | None,
        flag("What the answer begins with; the model goes on from there.", panel=PROMPT),
    ] = None
    chat_template_args: Annotated[
        str | None,
        flag(
            "JSON object of arguments for the chat template: '{\"enable_thinking\": false}'.",
            "--chat-template-args",
            "--chat-template-config",
            metavar="JSON",
            panel=PROMPT,
        ),
    ] = None
    max_tokens: Annotated[int, flag("The most tokens of one answer.", panel=ANSWER)] = 256
    stop: Annotated[
        list[str] | None,
        flag(
            "End the answer before this text. May be repeated.",
            metavar="TEXT",
            panel=ANSWER,
        ),
    ] = None
    extra_eos_token: Annotated[
        list[str] | None,
        flag(
            "End the answer at this token of the model, or token id. May be repeated.",
            metavar="TOKEN",
            panel=ANSWER,
        ),
    ] = None
    capacity: Annotated[
        int | None,
        flag(
            "The most positions the cache may hold. What needs more is refused, also under "
            "mlx-lm's name for it: no old position is overwritten to make room.",
            "--capacity",
            "--max-kv-size",
            default="the model's context length",
            panel=CACHE,
        ),
    ] = None
    kv_dtype: Annotated[
        str | None, flag(f"Dtype of the cache: {_DTYPES}.", default="the model's", panel=CACHE)
    ] = None
    spare: Annotated[
        int,
        flag(
            "Spare rows of a sliding-window layer; once it has wrapped, it can be rewound by as "
            "many tokens.",
            "--spare",
            "--max-write",
            panel=CACHE,
        ),
    ] = DEFAULT_SPARE
    windows: Annotated[
        str | None,
        flag(
            "Other windows: one for the sliding layers (32), or one for each cache layer "
            "(32,32,0); 0 keeps and attends to everything.",
            panel=CACHE,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model.strip():
            raise ConfigError("--model is empty; give a model's name or path")
        check_integer("--max-tokens", self.max_tokens, 1)
        check_integer("--capacity", self.capacity, 1)
        check_integer("--spare", self.spare, 1)
        check_dtype("--kv-dtype", self.kv_dtype)
        check_dtype("--dtype", self.dtype)
        for window in self.cache_windows or ():
            check_integer("--windows", window, 0)
        self._check_texts()
        if self.adapter_path is not None and not expanded(self.adapter_path).is_dir():
            raise ConfigError(f"--adapter-path {self.adapter_path} is no directory")
        _ = self.template_args
        self._check_template_is_used()

    def _check_texts(self) -> None:
        check_text("--model", self.model)
        check_text("--adapter-path", self.adapter_path)
        check_text("--system", self.system)
        check_text("--prefill-response", self.prefill_response)
        check_text("--chat-template-args", self.chat_template_args)
        for name, texts in (("--stop", self.stop), ("--extra-eos-token", self.extra_eos_token)):
            for text in texts or ():
                check_text(name, text)
                if not text:
                    raise ConfigError(f"{name} is empty; give some text, or leave it out")

    def _check_template_is_used(self) -> None:
        given = {
            "--system": self.system,
            "--prefill-response": self.prefill_response,
            "--chat-template-args": self.chat_template_args,
        }
        for name, value in given.items():
            if self.raw and value is not None:
                raise ConfigError(
                    f"{name} needs the chat template, which --raw turns off; leave one of them out"
                )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return tuple(self.stop or ())

    @property
    def template_args(self) -> dict[str, Any] | None:
        """The arguments for the chat template."""
        if self.chat_template_args is None:
            return None
        return parse_template_args(self.chat_template_args)

    @property
    def cache_windows(self) -> tuple[int, ...] | None:
        """The windows as numbers."""
        return None if self.windows is None else parse_windows(self.windows)


@dataclass(frozen=True)
class SequenceOptions(RunOptions):
    """The options of a command that runs one sequence at a time."""

    initial_capacity: Annotated[
        int | None,
        flag(
            "Rows with which full-attention layers start; they double from there.",
            default=str(DEFAULT_INITIAL_CAPACITY),
            panel=CACHE,
        ),
    ] = None
    prefill_step: Annotated[
        int | None,
        flag(
            "Prompt tokens of one forward pass.",
            "--prefill-step",
            "--prefill-step-size",
            default="2048 on a GPU, 256 on a CPU",
            panel=CACHE,
        ),
    ] = None

    compile: Annotated[
        bool | None,
        flag(
            "Build the graph of a token once, and replay it for the next ones.",
            "--compile/--no-compile",
            default="on a CPU, and on a GPU for small models",
            panel=CACHE,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("--initial-capacity", self.initial_capacity, 0)
        check_integer("--prefill-step", self.prefill_step, 1)


def with_flags(
    options: type[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of `options` as flags, in place of its parameter `options`."""
    hints = typing.get_type_hints(options, include_extras=True)
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)
    ]
    flags.sort(key=_panel_place)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            chosen = {each.name: arguments.pop(each.name) for each in flags}
            command(**arguments, options=options(**chosen))

        own = typing.get_type_hints(command, include_extras=True)
        parameters = flags + [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own[each.name])
            for each in inspect.signature(command).parameters.values()
            if each.name != "options"
        ]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _panel_place(parameter: inspect.Parameter) -> int:
    """Where the panel of a flag stands in `--help`; those without one come first."""
    (info,) = parameter.annotation.__metadata__
    panel = info.rich_help_panel
    return PANELS.index(panel) if panel in PANELS else -1


def parse_windows(text: str) -> tuple[int, ...]:
    """The windows of "32" or "32,32,0". Raises `ConfigError` for anything but integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--windows must be integers separated by commas, such as 32 or 32,32,0 (0 = flat), "
            f"got {text!r}"
        ) from error


def parse_template_args(text: str) -> dict[str, Any]:
    """The arguments of a JSON object. Raises `ConfigError` for anything else."""
    try:
        found = read_json(text)
    except ValueError as error:
        raise ConfigError(
            f"--chat-template-args is not valid JSON ({error}), got {shortened(text)}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"--chat-template-args must be a JSON object, got {shortened(text)}")
    from mlx_kvcache.chat.text import check_template_args

    try:
        check_template_args(found)
    except ConfigError as error:
        raise ConfigError(f"--chat-template-args: {error}") from error
    return found
