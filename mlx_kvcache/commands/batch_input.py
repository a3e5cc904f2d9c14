"""What `batch` is asked: its options, and the prompts, one a line, as JSON or as plain text."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any

from mlx_kvcache.commands.batch_fields import with_fields
from mlx_kvcache.commands.batch_lines import SYSTEM_ROLES, Content, read_fields, take_content
from mlx_kvcache.commands.console import decoded
from mlx_kvcache.commands.flags import CACHE, check_integer, flag
from mlx_kvcache.commands.named_files import read_named
from mlx_kvcache.commands.options import RunOptions
from mlx_kvcache.errors import ConfigError, KVCacheError

#: Options that change where rows are kept, and no answer.
_NO_ANSWER_CHANGES = frozenset({"capacity", "spare"})


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
            panel=CACHE,
        ),
    ] = None
    sessions: Annotated[int, flag("The most prompts that are answered at once.", panel=CACHE)] = 8
    cache: Annotated[
        CacheKind,
        flag(
            "cell: one pool of rows, common beginnings held once. batched: rows of its own for "
            "each prompt, sliding windows as real rings.",
            panel=CACHE,
        ),
    ] = CacheKind.CELL
    share_prefix: Annotated[
        bool,
        flag(
            "Read what all prompts begin with once, and fork from there.",
            "--share-prefix",
            panel=CACHE,
        ),
    ] = False
    prefill_budget: Annotated[
        int | None,
        flag(
            "The most tokens of one step; what decoding leaves of it goes to prompts.",
            default="2048 on a GPU, 256 on a CPU",
            panel=CACHE,
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
    """What one line asks. `label` is the line's own "id", None without one."""

    line: int
    content: Content
    options: BatchOptions
    label: Any = None

    @property
    def hash(self) -> str:
        """Tells whether two runs ask the same here: the content, its id, and what bears on answers.

        Options that are as by default do not count, so that new ones leave it as it is.
        """
        chosen = {
            one.name: getattr(self.options, one.name)
            for one in fields(RunOptions)
            if one.name not in _NO_ANSWER_CHANGES and getattr(self.options, one.name) != one.default
        }
        asked = json.dumps([self.content, self.label, chosen], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Refusal:
    """A line that cannot be answered, and why."""

    line: int
    error: KVCacheError
    label: Any = None


def read_lines(source: str | None) -> list[str]:
    """The lines of a file, or of standard input when `source` is "-" or None.

    Raises `ConfigError` when there is nothing to read or it is not UTF-8, `OSError`.
    """
    if source is None and sys.stdin.isatty():
        raise ConfigError("there are no prompts; give a file, or pipe some into standard input")
    from_stdin = source is None or source == "-"
    data = sys.stdin.buffer.read() if from_stdin else read_named(str(source), "prompts")
    text = decoded(data, "standard input" if from_stdin else str(source))
    # Only real line ends: JSON and prose may contain the other separators of str.splitlines.
    return [line.removesuffix("\r") for line in text.split("\n")]


def parse_lines(
    lines: Sequence[str], options: BatchOptions, plain: bool
) -> tuple[list[Prompt], list[Refusal]]:
    """What the lines that are not blank ask, and those that cannot be read, in their order.

    A line that begins with a brace or a quotation mark is JSON: a string, or an object with
    "prompt" or "messages" and, if it likes, "id" and the options of `line_options`. All other
    lines, or with `plain` every line, are prompts as they are. The prompt of line n gets the
    seed of the options plus n - 1. Raises `ConfigError` when all lines are blank.
    """
    prompts: list[Prompt] = []
    refusals: list[Refusal] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        seeded = _seeded(options, number)
        if plain or line.lstrip()[0] not in '{"':
            prompts.append(Prompt(number, line, seeded))
            continue
        label = None
        try:
            fields = read_fields(line)
            label = fields.pop("id", None)
            prompts.append(_prompt(number, fields, seeded, label))
        except KVCacheError as error:
            refusals.append(Refusal(number, error, label))
    if not prompts and not refusals:
        raise ConfigError("there are no prompts in the input; give one a line")
    return prompts, refusals


def refuse_first(refusals: Sequence[Refusal]) -> None:
    """Raise `ConfigError` for the first line that cannot be answered, if there is one."""
    if refusals:
        first = min(refusals, key=lambda refusal: refusal.line)
        raise ConfigError(
            f"line {first.line}: {first.error} (--skip-invalid answers the other lines)"
        ) from first.error


def _seeded(options: BatchOptions, line: int) -> BatchOptions:
    if options.seed is None:
        return options
    return replace(options, seed=(options.seed + line - 1) % 2**64)


def _prompt(number: int, fields: dict[str, Any], options: BatchOptions, label: Any) -> Prompt:
    content = take_content(fields)
    chosen = with_fields(options, fields)
    if not isinstance(content, str):
        if chosen.raw:
            raise ConfigError(
                '"messages" need the chat template, which --raw (or "raw") turns off; leave it '
                'out, or give a "prompt"'
            )
        if content[0]["role"] in SYSTEM_ROLES:
            if "system" in fields or "system_prompt" in fields:
                raise ConfigError('there are a "system" and a system message; give one of them')
        elif chosen.system is not None:
            content = ({"role": "system", "content": chosen.system}, *content)
        chosen = replace(chosen, system=None)
    return Prompt(number, content, chosen, label)
