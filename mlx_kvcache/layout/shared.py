"""Many sequences under one capacity: their ids, and the protocol of a step over some of them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mlx_kvcache.errors import (
    CapacityError,
    ConfigError,
    PositionError,
    RewindError,
    StepError,
    UnknownSequenceError,
)
from mlx_kvcache.facts.checks import is_integer
from mlx_kvcache.layout.steps import DeclaredStep, SpanRequest, StepSpan


class SharedLayout(ABC):
    """The sequences that share one capacity, and the step that runs over them.

    A step is declared before the forward pass, which checks it as a whole; the first layer places
    it, the other layers are answered with the same placement; after the last layer it is
    finished. A declaration authorises one placement. Verbs on sequences belong between steps:
    they drop the placement, and never stand for a declaration.

    A sequence whose step was placed but never finished has rows that some layers lack. It can
    only be rewound to where it stood before that step, or removed. Every refused call changes
    nothing.
    """

    def __init__(self, capacity: int, max_context: int | None = None) -> None:
        if max_context is not None and not is_integer(max_context, 1):
            raise ConfigError(
                f"max_context must be an integer >= 1 or None (no limit for a single sequence), "
                f"got {max_context!r}"
            )
        self.capacity = capacity
        self.max_context = max_context
        #: The step that was declared and is yet to be placed.
        self.declared: DeclaredStep | None = None
        #: The step that was placed last, unless a verb or a declaration has followed it.
        self.placed: DeclaredStep | None = None
        self._has_moved = False
        self._unfinished: dict[int, int] = {}
        self._next_id = 0
        self._returned_ids: list[int] = []

    @property
    @abstractmethod
    def sequences(self) -> tuple[int, ...]:
        """The ids of the live sequences, ascending."""

    @property
    @abstractmethod
    def used(self) -> int:
        """How much of the capacity is taken."""

    @abstractmethod
    def _length(self, sequence: int) -> int | None:
        """Positions that a sequence holds, None when there is no such sequence."""

    @abstractmethod
    def _claim(self, step: DeclaredStep) -> None:
        """Take what a checked step needs. Cannot fail."""

    @property
    def free(self) -> int:
        """How many more tokens fit."""
        return self.capacity - self.used

    @property
    def unfinished(self) -> Mapping[int, int]:
        """The sequences whose newest step was placed but not finished, and where it started."""
        return dict(self._unfinished)

    def position(self, sequence: int) -> int:
        """Positions that a sequence holds: its next token's. Raises `UnknownSequenceError`."""
        # True equals 1 as a key, and is no id.
        length = None if isinstance(sequence, bool) else self._length(sequence)
        if length is None:
            raise UnknownSequenceError(
                f"there is no sequence {sequence!r}; it was removed or never made. "
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
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        spans: list[StepSpan] = []
        numbers: list[int] = []
        for item in request:
            sequence, tokens = _checked_span(item)
            if sequence not in ends:
                ends[sequence] = starts[sequence] = self.position(sequence)
            position = ends[sequence]
            spans.append(StepSpan(sequence, len(numbers), tokens, position))
            ends[sequence] = position + tokens
            numbers.extend(range(position, position + tokens))
        step = DeclaredStep(tuple(spans), len(numbers), tuple(numbers), starts)
        self._admit(step, ends)
        if positions is not None:
            self.check_positions(step, positions)
        self.declared = step
        self.placed = None
        self._has_moved = False
        return step

    def next_placement(self, positions: Sequence[int] | None = None) -> DeclaredStep:
        """What `place_step` would answer now; raises what it would raise, changes nothing."""
        step = self.declared
        if step is not None:
            if positions is not None:
                self.check_positions(step, positions)
            if self._has_moved:
                self._check_still_fits(step)
            return step
        step = self.placed
        if step is None:
            raise StepError(
                "no step is declared, or a verb has dropped the one that ran; "
                "call declare_step before every forward pass"
            )
        if positions is not None:
            self.check_positions(step, positions)
        return step

    def place_step(self, positions: Sequence[int] | None = None) -> DeclaredStep:
        """Place the declared step, or answer the placement that it got already.

        Raises `StepError` when none is declared, or when sequences have moved since, and
        `PositionError` when the positions are not the declared ones.
        """
        step = self.next_placement(positions)
        if step is self.declared:
            self._claim(step)
            self.declared = None
            self.placed = step
            self._unfinished.update(step.starts)
        return step

    def finish_step(self) -> None:
        """Record that every layer has written the placed step."""
        if self.placed is not None:
            for sequence in self.placed.starts:
                self._unfinished.pop(sequence, None)

    def retract_declaration(self) -> None:
        """Forget a declared step that was not placed."""
        self.declared = None

    def check_finished(self, purpose: str) -> None:
        """Raise `StepError` while the newest step of some sequence is unfinished."""
        if self._unfinished:
            raise StepError(
                f"cannot {purpose}: the newest step of sequences "
                f"{', '.join(map(str, self._unfinished))} was not finished; abandon_step first"
            )

    def fork_length(self, sequence: int, up_to: int | None) -> int:
        """How many positions `fork(sequence, up_to)` would share; raises what it would raise."""
        length = self.position(sequence)
        wanted = length if up_to is None else up_to
        if not is_integer(wanted, 0, length):
            raise RewindError(
                f"cannot fork sequence {sequence} up to {wanted!r}: it holds {length} positions; "
                f"give 0 to {length}, or leave up_to out for all of them"
            )
        if wanted > self._unfinished.get(sequence, wanted):
            raise StepError(
                f"cannot fork sequence {sequence} up to {wanted}: its newest step was not "
                f"finished; rewind it to {self._unfinished[sequence]} first"
            )
        return wanted

    def check_rewind(self, sequence: int, position: int) -> None:
        """Raise unless `rewind(sequence, position)` is possible, as far as this layout knows."""
        length = self.position(sequence)
        if not is_integer(position):
            raise RewindError(f"a rewind needs an integer position, got {position!r}")
        if not 0 <= position <= length:
            raise RewindError(
                f"cannot rewind sequence {sequence} to {position}: it holds {length} positions, "
                f"so 0 to {length} can be asked for"
            )
        if position > self._unfinished.get(sequence, position):
            raise StepError(
                f"cannot rewind sequence {sequence} to {position}: its newest step was not "
                f"finished; rewind it to {self._unfinished[sequence]} or less"
            )

    def _lowest_unused_id(self) -> int:
        if self._returned_ids:
            return heapq.heappop(self._returned_ids)
        self._next_id += 1
        return self._next_id - 1

    def _return_id(self, sequence: int) -> None:
        self._unfinished.pop(sequence, None)
        heapq.heappush(self._returned_ids, sequence)

    def _rewound(self, sequence: int) -> None:
        self._unfinished.pop(sequence, None)
        self._dropped()

    def _dropped(self) -> None:
        """A verb changes the sequences: the placement goes, a declaration may be out of date."""
        self.placed = None
        self._has_moved = True

    def _admit(self, step: DeclaredStep, ends: Mapping[int, int]) -> None:
        if not step.tokens:
            raise StepError("a step needs at least one token; leave the step out instead")
        for sequence in step.starts:
            if sequence in self._unfinished:
                raise StepError(
                    f"the newest step of sequence {sequence} was not finished by every layer; "
                    f"abandon_step, or rewind it to {self._unfinished[sequence]}, or remove it"
                )
        if step.tokens > self.free:
            raise CapacityError(
                f"a step of {step.tokens} tokens does not fit: {self.used} of {self.capacity} "
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
            now = self._length(sequence)
            if now != start or sequence in self._unfinished:
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


def _checked_span(item: object) -> tuple[int, int]:
    """A span of a request whose form is right. Raises `StepError`."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise StepError(
            f"a step is a list of (sequence id, number of tokens), got {item!r} in it; "
            "spans_of_tokens makes one from a sequence id for each token"
        )
    sequence, tokens = item
    if type(sequence) is not int or type(tokens) is not int or tokens < 1:
        raise StepError(
            f"each span of a step is a sequence id and a number of tokens >= 1, got {item!r}"
        )
    return sequence, tokens
