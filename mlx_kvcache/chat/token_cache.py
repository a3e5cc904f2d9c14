"""A model and its cache, for tokens: fed, sampled, rewound and forked as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import cast

import mlx.core as mx

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.chat.checkpoints import RingCheckpoints
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.errors import RewindError
from mlx_kvcache.integrations.compiled import Model
from mlx_kvcache.integrations.mlx_lm import PromptCache, RecurrentStates

#: Takes logits [1, vocabulary] and answers the next token [1].
Choose = Callable[[mx.array], mx.array]
#: Tokens after which MLX's pool of freed buffers is emptied, as mlx-lm does.
_CLEAR_INTERVAL = 256
#: The most marked positions of which is kept what it takes to go back there.
MAX_KEPT = 16
#: The most bytes of that, where the cache itself is not larger; two positions are always kept.
KEPT_BYTES = 256 << 20


class TokenCache:
    """The cache of one sequence, recurrent states included, and the model that fills it.

    `length` counts the steps that every layer has finished, so that a `TokenHistory` over this
    puts a step right that was broken off.

    A recurrent state (SSM, linear attention, convolution) holds no row for each position, so it
    cannot be rewound, only put back: `states` has what it was, by position, for 0, the marked
    positions and the newest step. It is empty for a model that has no such layer. A
    sliding-window layer can be rewound by its spare rows; `checkpoints` has its rows at the marked
    positions. Of those the newest are kept: `MAX_KEPT` at most, and `KEPT_BYTES`.

    The cache must be empty. Its key is in the registry until `close`.
    """

    def __init__(self, model: Model, cache: PromptCache) -> None:
        self.model = model
        self.cache = cache
        self.states: dict[int, RecurrentStates] = {}
        if cache.recurrent:
            self.states[0] = cache.recurrent_states()
        self.checkpoints = RingCheckpoints(cache.sequence)
        self.session = CacheSession.around(cache.sequence).open()
        self._finished = 0
        self._marks: frozenset[int] = frozenset()
        self._kept: frozenset[int] = frozenset()

    @property
    def sequence(self) -> MLXSequenceCache:
        """The cache behind the list that the model takes."""
        return self.cache.sequence

    @property
    def length(self) -> int:
        """Positions that all layers hold."""
        return min(self._finished, self.sequence.length)

    def fork(self) -> TokenCache:
        """A copy that shares every array with this one until either of them writes to it.

        No step may be running ahead or broken off: settle the history first.
        """
        twin = TokenCache(self.model, self.cache.fork())
        twin.states = dict(self.states)
        twin.checkpoints = self.checkpoints.copy_for(twin.sequence)
        twin._finished = self._finished
        twin._marks, twin._kept = self._marks, self._kept
        return twin

    def close(self) -> None:
        """Take the cache out of the registry. May be repeated."""
        self.session.close()

    def feed(self, tokens: Sequence[int]) -> None:
        """Run the model over some more tokens in one step, and wait for it."""
        self._step(mx.array([list(tokens)]))
        self._wait()
        self._keep_place()
        mx.clear_cache()

    def generate(self, first: int, count: int, choose: Choose) -> Iterator[int]:
        """Feed the token `first`, then choose up to `count` tokens, and feed each of those.

        The step of a token is on its way by the time that token is yielded.
        """
        sampled = choose(self._step(mx.array([[first]])))
        mx.async_eval(sampled)  # type: ignore[no-untyped-call]
        for number in range(1, count + 1):
            logits = self._step(sampled[:, None])
            if number < count:
                following = choose(logits)
                mx.async_eval(following)  # type: ignore[no-untyped-call]
            yield int(cast(int, sampled.item()))
            if number < count:
                sampled = following
            if number % _CLEAR_INTERVAL == 0:
                mx.clear_cache()

    def rewind(self, position: int) -> None:
        """Forget the positions from `position` on; also ends a step that was broken off.

        Raises `RewindError`, and changes nothing, when the layers cannot go back that far.
        """
        by_rows = self._check_rewind(position)
        # In this order, an interruption anywhere leaves what the next call puts right.
        if by_rows:
            self.sequence.rewind(position)
        else:
            self.checkpoints.go_back(position)
        if self.states:
            self.cache.restore_recurrent(self.states[position])
            self.states = {place: each for place, each in self.states.items() if place <= position}
        self._marks = frozenset(place for place in self._marks if place <= position)
        self._kept &= self._marks
        self.checkpoints.keep(self._kept)
        self._finished = position
        self._wait()

    def _check_rewind(self, position: int) -> bool:
        """Whether the rows that are held are enough to go back; raises where nothing is."""
        if self.states and position not in self.states:
            reachable = ", ".join(str(place) for place in self.places())
            raise RewindError(
                f"cannot rewind from {self.length} to {position}: the model has recurrent "
                "layers, whose state goes back only to where it was recorded, the start of a "
                f"turn; {reachable} can be reached",
                nearest=self._nearest_place(position),
            )
        try:
            self.sequence.layout.check_rewind(position)
        except RewindError as error:
            if position in self.checkpoints.positions:
                return False
            nearest = max(self._nearest_place(position), 0 if self.states else error.nearest)
            raise RewindError(str(error), nearest) from error
        return True

    def places(self) -> tuple[int, ...]:
        """The positions that were kept, and to which all layers can go, lowest first."""
        kept = self.checkpoints.positions
        if not self.states:
            return (0, *kept)
        floor, length = self.sequence.rewind_floor, self.length
        return tuple(
            place
            for place in sorted(self.states)
            if not place or floor <= place <= length or place in kept
        )

    def _nearest_place(self, position: int) -> int:
        return max((place for place in self.places() if place <= position), default=0)

    @property
    def keeps_places(self) -> bool:
        """Whether the model has layers that need a marked position to go back to."""
        return bool(self.states) or self.checkpoints.useful

    def mark(self, positions: Collection[int]) -> None:
        """Name more positions to go back to later, where the cache stands or a `feed` will end."""
        self._marks |= frozenset(positions)
        self._keep_place()

    def _keep_place(self) -> None:
        """Keep what it takes to come back here, if it is marked, and let go of what is too much."""
        if 0 < self.length in self._marks:
            self.checkpoints.take()
        cost = self.checkpoints.place_nbytes + self._state_nbytes
        room = max(KEPT_BYTES, self.sequence.nbytes) // cost if cost else MAX_KEPT
        self._kept = frozenset(sorted(self._marks)[-min(MAX_KEPT, max(2, room)) :])
        self.checkpoints.keep(self._kept)

    @property
    def _state_nbytes(self) -> int:
        return sum(int(entry.nbytes) for entry in self.cache.recurrent)

    def _wait(self) -> None:
        """Wait until everything that the cache holds is computed."""
        mx.eval([entry.state for entry in self.cache])

    def _step(self, tokens: mx.array) -> mx.array:
        """One forward pass over tokens [1, T]; the logits [1, V] after the last."""
        logits: mx.array = self.model(tokens, cache=self.cache)
        position = self.sequence.length
        if self.states:
            # What was before this step is needed when the step turns out to be one too many.
            kept = {0, position - tokens.shape[1], *self._kept}
            states = {place: each for place, each in self.states.items() if place in kept}
            self.states = {**states, position: self.cache.recurrent_states()}
        self._finished = position
        return logits[:, -1, :]


def spans(start: int, stop: int, size: int, breaks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """`start` to `stop` in pieces of at most `size`, none of which goes across a break."""
    ends = sorted({stop, *(place for place in breaks if start < place < stop)})
    for end in ends:
        for first in range(start, end, size):
            yield first, min(first + size, end)
        start = max(start, end)
