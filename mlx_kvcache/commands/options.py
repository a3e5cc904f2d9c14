"""The options of `generate` and `chat`, checked before anything is loaded."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import KV_DTYPES, MAX_CAPACITY

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class RunOptions:
    """What was asked of the model, beside the prompt. None stands for a default of the model.

    Raises `ConfigError`, naming the flag and its value, for what cannot be.
    """

    model: str
    max_tokens: int
    temp: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    capacity: int | None = None
    kv_dtype: str | None = None
    initial_capacity: int | None = None
    spare: int | None = None
    windows: tuple[int, ...] | None = None
    dtype: str | None = None
    raw: bool = False
    system: str | None = None
    prefill_step: int | None = None

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ConfigError("--model is empty; give a model's name or path")
        _check_integer("--max-tokens", self.max_tokens, 1)
        _check_integer("--capacity", self.capacity, 1)
        _check_integer("--initial-capacity", self.initial_capacity, 0)
        _check_integer("--spare", self.spare, 1)
        _check_integer("--prefill-step", self.prefill_step, 1)
        _check_integer("--seed", self.seed, 0, _MAX_SEED)
        if not (math.isfinite(self.temp) and self.temp >= 0):
            raise ConfigError(f"--temp must be 0 (greedy) or a positive number, got {self.temp}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        _check_dtype("--kv-dtype", self.kv_dtype)
        _check_dtype("--dtype", self.dtype)
        for window in self.windows or ():
            _check_integer("--windows", window, 0)
        if self.raw and self.system is not None:
            raise ConfigError(
                "--system needs the chat template, which --raw turns off; leave one of them out"
            )


def parse_windows(text: str | None) -> tuple[int, ...] | None:
    """The windows of "32" or "32,32,0". Raises `ConfigError` for anything but integers."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--windows must be integers separated by commas, such as 32 or 32,32,0 (0 = flat), "
            f"got {text!r}"
        ) from error


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or standard input when that is "-" or absent and input is piped.

    The line end that closes piped input is not part of it. Raises `ConfigError` when there is no
    prompt, when it is empty, or when it is not UTF-8.
    """
    if argument is None and sys.stdin.isatty():
        raise ConfigError(
            "there is no prompt; give one as the argument, or pipe one into standard input"
        )
    prompt = _read_stdin() if argument is None or argument == "-" else argument
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give some text to continue or to answer")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt is not valid UTF-8; give it as UTF-8 text") from error
    return prompt


def _read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not valid UTF-8 ({error.reason} at byte {error.start}); "
            "convert the prompt to UTF-8"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _check_integer(flag: str, value: int | None, minimum: int, maximum: int = MAX_CAPACITY) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise ConfigError(f"{flag} must be between {minimum} and {maximum}, got {value}")


def _check_dtype(flag: str, value: str | None) -> None:
    if value is not None and value not in KV_DTYPES:
        raise ConfigError(f"{flag} must be one of {', '.join(KV_DTYPES)}, got {value!r}")
