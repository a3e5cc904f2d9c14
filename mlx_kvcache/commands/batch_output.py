"""The results of `batch`: JSON lines, and how they come to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from mlx_kvcache.commands.batch_input import Refusal
from mlx_kvcache.commands.console import discard_stdout

if TYPE_CHECKING:
    from mlx_kvcache.commands.batch_resume import Claim

INVALID = "invalid"


class Results(Protocol):
    """Where results go. Raises `OSError`."""

    def write(self, number: int, line: Callable[[], str]) -> None:
        """Take the result of an input line, unless it was taken already."""

    def finish(self) -> None:
        """Write what was still held back."""


class Unordered:
    """Writes results to standard output at once."""

    def __init__(self) -> None:
        self._written: set[int] = set()

    def write(self, number: int, line: Callable[[], str]) -> None:
        """Write the result of an input line, unless it was written already."""
        if number not in self._written:
            _write(line())
            self._written.add(number)

    def finish(self) -> None:
        """Nothing was held back."""


class InOrder:
    """Writes results to standard output as soon as all those before them are written.

    order: the input lines that will have one.
    """

    def __init__(self, order: Iterable[int]) -> None:
        self._order = list(order)
        self._next = 0
        self._taken: set[int] = set()
        self._waiting: dict[int, str] = {}

    def write(self, number: int, line: Callable[[], str]) -> None:
        """Write the result of an input line when its turn comes."""
        if number not in self._taken:
            self._waiting[number] = line()
            self._taken.add(number)
        while self._next < len(self._order) and self._order[self._next] in self._waiting:
            _write(self._waiting.pop(self._order[self._next]))
            self._next += 1

    def finish(self) -> None:
        """Write the other results too, those of a run that was stopped."""
        for number in sorted(self._waiting):
            _write(self._waiting.pop(number))


def results_of(
    claim: Claim | None, unordered: bool, order: Iterable[int]
) -> AbstractContextManager[Results]:
    """Where the results go: a file, or standard output."""
    if claim is not None:
        return claim.open()
    return nullcontext(Unordered() if unordered else InOrder(order))


def result_line(facts: Mapping[str, Any]) -> str:
    """A result as it is written."""
    return json.dumps(facts) + "\n"


def refusal_line(refusal: Refusal) -> str:
    """The result of a line that cannot be answered, with the fields of all others."""
    facts = {
        "line": refusal.line,
        "id": refusal.label,
        "text": "",
        "finish_reason": INVALID,
        "stop_text": None,
        "error": str(refusal.error),
        "prompt_tokens": None,
        "generated_tokens": 0,
        "token_ids": [],
        "input_hash": None,
        "queue_seconds": None,
        "first_token_seconds": None,
        "total_seconds": None,
    }
    return result_line(facts)


def _write(line: str) -> None:
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except OSError:
        # Its flush at the end would fail again.
        discard_stdout()
        raise
