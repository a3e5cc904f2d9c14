"""A step over several sequences: which tokens belong to whom, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

#: What a step asks for: (sequence id, number of tokens) for each span, in token order.
SpanRequest = Sequence[tuple[int, int]]


class StepSpan(NamedTuple):
    """Consecutive tokens of a step that belong to one sequence.

    first: index of the first of them among the tokens of the step. position: its position in the
    sequence.
    """

    sequence: int
    first: int
    tokens: int
    position: int


@dataclass(frozen=True)
class DeclaredStep:
    """A step of `tokens` tokens that was checked as a whole.

    spans: in token order; a sequence may have several, which continue each other.
    positions: the position of each token. starts, ends: for each sequence, its position before and
    after the step.
    """

    spans: tuple[StepSpan, ...]
    tokens: int
    positions: tuple[int, ...]
    starts: dict[int, int]
    ends: dict[int, int]

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences in the order in which they first appear."""
        return tuple(self.starts)

    @property
    def token_sequences(self) -> tuple[int, ...]:
        """The sequence of each token."""
        return tuple(span.sequence for span in self.spans for _ in range(span.tokens))

    @property
    def last_tokens(self) -> tuple[int, ...]:
        """For each of `sequences`, the index of its last token: where its next token is read."""
        last = {span.sequence: span.first + span.tokens - 1 for span in self.spans}
        return tuple(last[sequence] for sequence in self.starts)


def spans_of_tokens(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """The spans (sequence id, number of tokens) of a step given as one sequence id a token."""
    return [(sequence, len(list(group))) for sequence, group in groupby(sequences)]
