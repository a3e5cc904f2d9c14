"""How an option is declared as a flag, and how values are checked under the flag's name."""

from __future__ import annotations

from typing import Any

import typer

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import KV_DTYPES, MAX_CAPACITY

#: The panels of `--help`: what typer calls those without a theme, and the themes.
ARGUMENTS = "Arguments"
OPTIONS = "Options"
MODEL = "Model"
PROMPT = "Prompt"
ANSWER = "Answer"
SAMPLING = "Sampling"
CACHE = "Cache"
OUTPUT = "Output"
PANELS = (MODEL, PROMPT, ANSWER, SAMPLING, CACHE, OUTPUT)


def flag(
    text: str, *names: str, default: str = "", panel: str | None = None, **choices: Any
) -> Any:
    """A flag with its help; `default` says what None stands for. choices: those of typer."""
    said = f"{text} [default: {default}]" if default else text
    return typer.Option(
        *names, help=said, show_default=not default, rich_help_panel=panel, **choices
    )


def check_integer(flag: str, value: int | None, minimum: int, maximum: int = MAX_CAPACITY) -> None:
    """Raise `ConfigError`, naming the flag, unless the value is within the bounds or None."""
    if value is not None and not minimum <= value <= maximum:
        raise ConfigError(f"{flag} must be between {minimum} and {maximum}, got {value}")


def check_dtype(flag: str, value: str | None) -> None:
    """Raise `ConfigError`, naming the flag, unless the value is a storage dtype or None."""
    if value is not None and value not in KV_DTYPES:
        raise ConfigError(f"{flag} must be one of {', '.join(KV_DTYPES)}, got {value!r}")


def check_text(flag: str, value: str | None) -> None:
    """Raise `ConfigError`, naming the flag, for text that did not come as UTF-8."""
    try:
        (value or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{flag} is not valid UTF-8; give it as UTF-8 text") from error
