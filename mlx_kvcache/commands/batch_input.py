"""What `batch` is asked: its options, and the prompts, one a line, as JSON or as plain text."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from mlx_kvcache.commands.console import decoded
from mlx_kvcache.commands.flags import check_integer, flag
from mlx_kvcache.commands.options import RunOptions
from mlx_kvcache.errors import ConfigError

_OPTIONS = {"max_tokens": int, "temp": float, "top_p": float, "seed": int, "system": str}


class CacheKind(StrEnum):
    """The cache."""

    CELL = "cell"
    BATCHED = "batched"


@dataclass(frozen=True)
class BatchOptions(RunOptions):
    """How the prompts run together, beside what each of them asks for."""

    capacity: Annotated[
        int | None,
        flag(
            "The most positions that all sessions hold together.",
            default="enough for the largest prompts at once",
        ),
    ] = None
    sessions: Annotated[int, flag("The most prompts that are answered at once.")] = 8
    cache: Annotated[
        CacheKind,
        flag(
            "cell: one pool of rows, common beginnings held once. batched: rows of its own for "
            "each prompt, sliding windows as real rings."
        ),
    ] = CacheKind.CELL
    share_prefix: Annotated[
        bool, flag("Read what all prompts begin with once, and fork from there.", "--share-prefix")
    ] = False
    prefill_budget: Annotated[
        int | None,
        flag(
            "The most tokens of one step; what decoding leaves of it goes to prompts.",
            default="2048 on a GPU, 256 on a CPU",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sessions < 1:
            raise ConfigError(f"--sessions must be at least 1, got {self.sessions}")
        check_integer("--prefill-budget", self.prefill_budget, 1)
        if self.prefill_budget is not None and self.prefill_budget < self.sessions:
            raise ConfigError(
                f"--prefill-budget {self.prefill_budget} is less than one token for each of "
                f"{self.sessions} sessions; raise it, or lower --sessions"
            )


@dataclass(frozen=True)
class Prompt:
    """One prompt and what was asked for it. `label` is the line's own "id", None without one."""

    line: int
    text: str
    options: RunOptions
    label: Any = None


def read_lines(source: str | None) -> list[str]:
    """The lines of a file, or of standard input when `source` is "-" or None.

    Raises `ConfigError` when there is nothing to read or it is not UTF-8, `OSError`.
    """
    if source is None and sys.stdin.isatty():
        raise ConfigError("there are no prompts; give a file, or pipe some into standard input")
    from_stdin = source is None or source == "-"
    data = sys.stdin.buffer.read() if from_stdin else Path(str(source)).read_bytes()
    text = decoded(data, "standard input" if from_stdin else str(source))
    # Only real line ends: JSON and prose may contain the other separators of str.splitlines.
    return [line.removesuffix("\r") for line in text.split("\n")]


def parse_prompts(lines: list[str], options: RunOptions, plain: bool) -> list[Prompt]:
    """The prompts of the lines that are not blank. Raises `ConfigError` naming the line.

    A line that begins with a brace or a quotation mark is JSON: a string, or an object with
    "prompt" and, if it likes, "id", "max_tokens", "temp", "top_p", "seed", "system". All other
    lines, or with `plain` every line, are prompts as they are. The prompt of line n gets the
    seed of the options plus n - 1.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            is_json = not plain and line.lstrip()[0] in '{"'
            prompts.append(_from_json(number, line, options) if is_json
                           else Prompt(number, line, _seeded(options, number)))  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from error
    if not prompts:
        raise ConfigError("there are no prompts in the input; give one a line")
    return prompts


def _seeded(options: RunOptions, line: int) -> RunOptions:
    if options.seed is None:
        return options
    return replace(options, seed=(options.seed + line - 1) % 2**64)


def _from_json(number: int, line: str, options: RunOptions) -> Prompt:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON ({error.msg} at column {error.colno}); repair it, or use --text for "
            "plain text"
        ) from error
    fields = {"prompt": content} if isinstance(content, str) else content
    text = fields.pop("prompt", None)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'"prompt" must be a string that is not blank, got {text!r}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt holds half of a surrogate pair; repair the escape") from error
    label = fields.pop("id", None)
    for name, value in fields.items():
        _check_field(name, value)
    return Prompt(number, text, replace(_seeded(options, number), **fields), label)


def _check_field(name: str, value: object) -> None:
    if name not in _OPTIONS:
        raise ConfigError(f"unknown field {name!r}; there are prompt, id, {', '.join(_OPTIONS)}")
    wanted = _OPTIONS[name]
    accepted = (int, float) if wanted is float else (wanted,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        kind = {int: "an integer", float: "a number", str: "a string"}[wanted]
        raise ConfigError(f"{name!r} must be {kind}, got {value!r}")
