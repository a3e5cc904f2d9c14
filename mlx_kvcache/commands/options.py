"""The options that the commands share: each declared once, as a flag, and checked once."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import (
    DEFAULT_INITIAL_CAPACITY,
    DEFAULT_SPARE,
    KV_DTYPES,
    MAX_CAPACITY,
)

if TYPE_CHECKING:
    from mlx_kvcache.integrations.sampling import Sampling

_DTYPES = "float32, float16 or bfloat16"


def flag(text: str, *names: str, default: str = "") -> Any:
    """A flag with its help; `default` says what None stands for."""
    said = f"{text} [default: {default}]" if default else text
    return typer.Option(*names, help=said, show_default=not default)


@dataclass(frozen=True)
class RunOptions:
    """What was asked of the model, beside the prompt. None stands for a default of the model.

    Raises `ConfigError`, naming the flag and its value, for what cannot be.
    """

    model: Annotated[
        str,
        flag(
            "A demo (smollm2, gemma3-270m), a model directory, a .gguf file or a hub id.",
            "--model",
            "-m",
        ),
    ] = "smollm2"
    max_tokens: Annotated[int, flag("The most tokens of one answer.")] = 256
    temp: Annotated[float, flag("Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[
        float, flag("Sample from the most likely tokens of this total probability.")
    ] = 1.0
    seed: Annotated[
        int | None, flag("Seed of the sampling.", default="another one in each run")
    ] = None
    system: Annotated[str | None, flag("System prompt for the chat template.")] = None
    raw: Annotated[bool, flag("Continue the text as it is, without chat template.", "--raw")] = (
        False
    )
    dtype: Annotated[
        str | None,
        flag(f"Dtype of the weights: {_DTYPES}.", default="float32 on a CPU, else as stored"),
    ] = None
    capacity: Annotated[
        int | None,
        flag("The most positions the cache may hold.", default="the model's context length"),
    ] = None
    kv_dtype: Annotated[
        str | None, flag(f"Dtype of the cache: {_DTYPES}.", default="the model's")
    ] = None
    spare: Annotated[
        int,
        flag(
            "Spare rows of a sliding-window layer; once it has wrapped, it can be rewound by as "
            "many tokens.",
            "--spare",
            "--max-write",
        ),
    ] = DEFAULT_SPARE
    windows: Annotated[
        str | None,
        flag(
            "Other windows: one for the sliding layers (32), or one for each cache layer "
            "(32,32,0); 0 keeps and attends to everything."
        ),
    ] = None

    def __post_init__(self) -> None:
        from mlx_kvcache.integrations.sampling import check_sampling

        if not self.model.strip():
            raise ConfigError("--model is empty; give a model's name or path")
        check_integer("--max-tokens", self.max_tokens, 1)
        check_integer("--capacity", self.capacity, 1)
        check_integer("--spare", self.spare, 1)
        try:
            check_sampling(self.sampling)
        except ConfigError as error:
            raise ConfigError(f"--{str(error).replace('_', '-', 1)}") from error
        check_dtype("--kv-dtype", self.kv_dtype)
        check_dtype("--dtype", self.dtype)
        for window in self.cache_windows or ():
            check_integer("--windows", window, 0)
        if self.raw and self.system is not None:
            raise ConfigError(
                "--system needs the chat template, which --raw turns off; leave one of them out"
            )

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        from mlx_kvcache.integrations.sampling import Sampling

        return Sampling(self.temp, self.top_p, self.seed)

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
        ),
    ] = None
    prefill_step: Annotated[
        int | None,
        flag("Prompt tokens of one forward pass.", default="2048 on a GPU, 256 on a CPU"),
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


def parse_windows(text: str) -> tuple[int, ...]:
    """The windows of "32" or "32,32,0". Raises `ConfigError` for anything but integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--windows must be integers separated by commas, such as 32 or 32,32,0 (0 = flat), "
            f"got {text!r}"
        ) from error


def check_integer(flag: str, value: int | None, minimum: int, maximum: int = MAX_CAPACITY) -> None:
    """Raise `ConfigError`, naming the flag, unless the value is within the bounds or None."""
    if value is not None and not minimum <= value <= maximum:
        raise ConfigError(f"{flag} must be between {minimum} and {maximum}, got {value}")


def check_dtype(flag: str, value: str | None) -> None:
    """Raise `ConfigError`, naming the flag, unless the value is a storage dtype or None."""
    if value is not None and value not in KV_DTYPES:
        raise ConfigError(f"{flag} must be one of {', '.join(KV_DTYPES)}, got {value!r}")
