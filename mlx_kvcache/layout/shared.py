"""Many sequences under one capacity: their ids, and the protocol of a step over some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from operator import index
from typing import Generic

from mlx_kvcache.errors import (
    CapacityError,
    ConfigError,
    PositionError,
    RewindError,
    StepError,
    UnknownSequenceError,
)
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.layout.standing import Member, Standing
from mlx_kvcache.layout.steps import DeclaredStep, SpanRequest, StepSpan


class SharedLayout(ABC, Generic[Member]):
    """The sequences that share one capacity, and the step that runs over them.

    A step is declared before the forward pass, which checks it as a whole; the first layer places
    it, the other layers are answered with the same placement; after the last layer it is
    finished. A declaration authorises one placement. Verbs on sequences belong between steps:
    they drop the placement, and never stand for a declaration.

    A sequence whose step was placed but never finished has rows that some layers lack. It can
    only be rewound to where it stood before that step, or removed. Every refused call changes
    nothing. A call that is interrupted, at whatever line, has been made or has not: `now` is
    replaced by one assignment, and what is derived from it is derived anew.
    """

    def __init__(self, capacity: int, max_context: int | None = None) -> None:
        if max_context is not None and not is_integer(max_context, 1):
            raise ConfigError(
                f"max_context must be an integer >= 1 or None (no limit for a single sequence), "
                f"got {max_context!r}"
            )
        self.capacity = capacity
        self.max_context = max_context
        self.now: Standing[Member] = Standing({}, {})
        # Whether what is derived from `now` may not fit it: a verb runs, or was interrupted.
        self._is_torn = False

    @property
    @abstractmethod
    def used(self) -> int:
        """How much of the capacity is taken."""

    @abstractmethod
    def _claim(self, step: DeclaredStep) -> None:
        """Prepare what a checked step takes once it is placed."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of the live sequences, ascending."""
        return tuple(sorted(self.now.lengths))

    @property
    def free(self) -> int:
        """How many more tokens fit."""
        return self.capacity - self.used

    @property
    def unfinished(self) -> Mapping[int, int]:
        """The sequences whose newest step was placed but not finished, and where it started."""
        return dict(self.now.unfinished)

    def position(self, sequence: int) -> int:
        """Positions that a sequence holds: its next token's. Raises `UnknownSequenceError`."""
        # True equals 1 as a key, and is no id.
        length = self.now.lengths.get(sequence) if type(sequence) is int else None
        if length is None:
            raise UnknownSequenceError(
                f"there is no sequence {shortened(sequence)}; it was removed or never made. "
                f"Live: {_listed(self.sequences)}"
            )
        return length

    def declare_step(
        self, request: SpanRequest, positions: Sequence[int] | None = None
    ) -> DeclaredStep:
        """Admit a step: (sequence id, number of tokens) for each span, in token order.

        `positions`, when given, are those that the caller counts on, one for each token. The
        step takes the place of an earlier declaration. Raises `StepError` (malformed, or a
        sequence with an unfinished step), `UnknownSequenceError`, `CapacityError` or
        `PositionError`, and then the earlier declaration stands.
        """
        lengths = self.now.lengths
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        spans: list[StepSpan] = []
        total = 0
        for sequence, tokens in _checked_spans(request):
            position = ends.get(sequence)
            if position is None:
                position = lengths.get(sequence)
                if position is None:
                    position = self.position(sequence)
                starts[sequence] = position
            spans.append(StepSpan(sequence, total, tokens, position))
            ends[sequence] = position + tokens
            total += tokens
        self._admit(total, ends)
        numbers: list[int] = []
        for _, _, tokens, position in spans:
            numbers.extend(range(position, position + tokens))
        step = DeclaredStep(tuple(spans), total, tuple(numbers), starts, ends)
        if positions is not None:
            self.check_positions(step, _integers(positions))
        self.now = self.now._replace(declared=step, placed=None, has_moved=False)
        return step

    def next_placement(self, positions: Sequence[int] | None = None) -> DeclaredStep:
        """What `place_step` would answer now; raises what it would raise, changes nothing."""
        now = self.now
        step = now.declared or now.placed
        if step is None:
            raise StepError(
                "no step is declared, or a verb has dropped the one that ran; "
                "call declare_step before every forward pass"
            )
        if positions is not None:
            self.check_positions(step, positions)
        if now.declared is not None and now.has_moved:
            self._check_still_fits(step)
        return step

    def place_step(self, positions: Sequence[int] | None = None) -> DeclaredStep:
        """Place the declared step, or answer the placement that it got already.

        Raises `StepError` when none is declared, or when sequences have moved since, and
        `PositionError` when the positions are not the declared ones.
        """
        step = self.next_placement(positions)
        now = self.now
        if step is now.declared:
            self._claim(step)
            self.now = now._replace(
                lengths=now.lengths | step.ends,
                unfinished={**now.unfinished, **step.starts},
                declared=None,
                placed=step,
            )
            self._is_torn = False
        return step

    def stand(self, standing: Standing[Member]) -> None:
        """Stand as before a placement that was refused after all; what follows is derived anew."""
        self._is_torn = True
        self.now = standing

    def finish_step(self) -> None:
        """Record that every layer has written the placed step."""
        now = self.now
        if now.placed is not None:
            unfinished, kept = dict(now.unfinished), dict(now.kept)
            for sequence in now.placed.starts:
                unfinished.pop(sequence, None)
                kept.pop(sequence, None)
            self.now = now._replace(unfinished=unfinished, kept=kept)

    def retract_declaration(self) -> None:
        """Forget a declared step that was not placed."""
        self.now = self.now._replace(declared=None)

    def check_finished(self, purpose: str) -> None:
        """Raise `StepError` while the newest step of some sequence is unfinished."""
        unfinished = self.now.unfinished
        if unfinished:
            raise StepError(
                f"cannot {purpose}: the newest step of sequences "
                f"{', '.join(map(str, unfinished))} was not finished; abandon_step first"
            )

    def fork_length(self, sequence: int, up_to: int | None) -> int:
        """How many positions `fork(sequence, up_to)` would share; raises what it would raise."""
        length = self.position(sequence)
        wanted = length if up_to is None else up_to
        if not is_integer(wanted, 0, length):
            raise RewindError(
                f"cannot fork sequence {sequence} up to {shortened(wanted)}: it holds {length} "
                f"positions; give 0 to {length}, or leave up_to out for all of them"
            )
        start = self.now.unfinished.get(sequence, wanted)
        if wanted > start:
            raise StepError(
                f"cannot fork sequence {sequence} up to {wanted}: its newest step was not "
                f"finished; rewind it to {start} first"
            )
        return wanted

    def check_rewind(self, sequence: int, position: int) -> None:
        """Raise unless `rewind(sequence, position)` is possible, as far as this layout knows."""
        length = self.position(sequence)
        if not is_integer(position):
            raise RewindError(f"a rewind needs an integer position, got {shortened(position)}")
        if not 0 <= position <= length:
            raise RewindError(
                f"cannot rewind sequence {sequence} to {position}: it holds {length} positions, "
                f"so 0 to {length} can be asked for",
                nearest=max(0, min(position, length)),
            )
        start = self.now.unfinished.get(sequence, position)
        if position > start:
            raise StepError(
                f"cannot rewind sequence {sequence} to {position}: its newest step was not "
                f"finished; rewind it to {start} or less"
            )

    def _lowest_unused_id(self) -> int:
        live = self.now.lengths
        return next(identity for identity in count() if identity not in live)

    def _admit(self, tokens: int, ends: Mapping[int, int]) -> None:
        if not tokens:
            raise StepError("a step needs at least one token; leave the step out instead")
        unfinished = self.now.unfinished
        for sequence in ends:
            if sequence in unfinished:
                raise StepError(
                    f"the newest step of sequence {sequence} was not finished by every layer; "
                    f"abandon_step, or rewind it to {unfinished[sequence]}, or remove it"
                )
        if tokens > self.free:
            raise CapacityError(
                f"a step of {tokens} tokens does not fit: {self.used} of {self.capacity} "
                f"positions are used and {self.free} are free; remove or rewind sequences, "
                "or make the cache with a larger capacity"
            )
        if self.max_context is None:
            return
        for sequence, end in ends.items():
            if end > self.max_context:
                raise CapacityError(
                    f"sequence {sequence} would hold {end} positions, but max_context "
                    f"allows {self.max_context}; rewind it, or make the cache with a larger one"
                )

    def check_positions(self, step: DeclaredStep, positions: Sequence[int]) -> None:
        """Raise `PositionError` unless these are the positions of the step's tokens."""
        given = tuple(positions)
        if given == step.positions:
            return
        if len(given) != step.tokens:
            raise PositionError(
                f"{len(given)} positions were given for a step of {step.tokens} tokens"
            )
        wrong = next(i for i, position in enumerate(given) if position != step.positions[i])
        raise PositionError(
            f"token {wrong} of the step, of sequence {step.token_sequences[wrong]}, was given "
            f"position {given[wrong]!r}; its sequence continues at {step.positions[wrong]}. "
            "Declare a new step for other positions, or rewind the sequence first"
        )

    def _check_still_fits(self, step: DeclaredStep) -> None:
        for sequence, start in step.starts.items():
            now = self.now.lengths.get(sequence)
            if now != start or sequence in self.now.unfinished:
                stands = "is gone" if now is None else f"stands at {now}"
                raise StepError(
                    f"the declared step continues sequence {sequence} at {start}, "
                    f"which {stands} by now; declare the step again"
                )
        if step.tokens > self.free:
            raise CapacityError(
                f"the declared step of {step.tokens} tokens no longer fits: {self.free} of "
                f"{self.capacity} positions are free; remove or rewind sequences"
            )


def _listed(sequences: Sequence[int]) -> str:
    if not sequences:
        return "none"
    shown = ", ".join(map(str, sequences[:16]))
    return f"{shown}, ... ({len(sequences)} in all)" if len(sequences) > 16 else shown


def _integers(positions: object) -> list[int]:
    """Positions as ints. Raises `PositionError` for what is no list of integers."""
    try:
        given = list(positions)  # type: ignore[call-overload]
        if not any(isinstance(each, bool) for each in given):
            return [index(each) for each in given]
    except (TypeError, ValueError):
        pass
    raise PositionError(
        f"the positions of a step are one integer for each token, got {shortened(positions)}"
    )


def _checked_spans(request: object) -> list[tuple[int, int]]:
    """The spans of a request whose form is right. Raises `StepError`."""
    if not isinstance(request, Sequence) or isinstance(request, str | bytes):
        raise StepError(
            f"a step is a list of (sequence id, number of tokens), got {shortened(request)}; "
            "spans_of_tokens makes one from a sequence id for each token"
        )
    spans = []
    for item in request:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise StepError(
                f"a step is a list of (sequence id, number of tokens), got {shortened(item)} in "
                "it; spans_of_tokens makes one from a sequence id for each token"
            )
        sequence, tokens = item
        if type(sequence) is not int or type(tokens) is not int or tokens < 1:
            raise StepError(
                "each span of a step is a sequence id and a number of tokens >= 1, got "
                f"{shortened(item)}"
            )
        spans.append((sequence, tokens))
    return spans
