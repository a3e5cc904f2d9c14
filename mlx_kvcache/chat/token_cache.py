"""A model and its cache, for tokens: fed, sampled, rewound and forked as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.errors import RewindError
from mlx_kvcache.integrations.mlx_lm import PromptCache, RecurrentStates

#: Takes logits [1, vocabulary] and answers the next token [1].
Choose = Callable[[mx.array], mx.array]
#: Tokens after which MLX's pool of freed buffers is emptied, as mlx-lm does.
_CLEAR_INTERVAL = 256
#: How many of the marked positions keep their recurrent states; each costs one state of the model.
MAX_KEPT = 16


class TokenCache:
    """The cache of one sequence, recurrent states included, and the model that fills it.

    `length` counts the steps that every layer has finished, so that a `TokenHistory` over this
    puts a step right that was broken off.

    A recurrent state (SSM, linear attention, convolution) holds no row for each position, so it
    cannot be rewound, only put back: `states` has what it was, by position, for 0, the marked
    positions and the newest step. It is empty for a model that has no such layer.

    The cache must be empty. Its key is in the registry until `close`.
    """

    def __init__(self, model: Module, cache: PromptCache) -> None:
        self.model = model
        self.cache = cache
        self.states: dict[int, RecurrentStates] = {}
        if cache.recurrent:
            self.states[0] = cache.recurrent_states()
        self.session = CacheSession.around(cache.sequence).open()
        self._finished = 0
        self._marks: tuple[int, ...] = ()

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
        twin._finished = self._finished
        twin._marks = self._marks
        return twin

    def close(self) -> None:
        """Take the cache out of the registry. May be repeated."""
        self.session.close()

    def feed(self, tokens: Sequence[int]) -> None:
        """Run the model over some more tokens in one step, and wait for it."""
        self._step(mx.array([list(tokens)]))
        self._wait()
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
        if self.states and position not in self.states:
            reachable = self.reachable_states()
            raise RewindError(
                f"cannot rewind from {self.length} to {position}: the model has recurrent "
                "layers, whose state goes back only to where it was recorded, the start of a "
                f"turn; {', '.join(str(place) for place in reachable)} can be reached",
                nearest=max((place for place in reachable if place <= position), default=0),
            )
        # In this order, an interruption anywhere leaves what the next call puts right.
        self.sequence.rewind(position)
        if self.states:
            self.cache.restore_recurrent(self.states[position])
            self.states = {place: each for place, each in self.states.items() if place <= position}
        self._finished = position
        self._wait()

    def reachable_states(self) -> tuple[int, ...]:
        """The recorded positions of the recurrent states to which all other layers can go too."""
        floor, length = self.sequence.rewind_floor, self.length
        return tuple(
            place for place in sorted(self.states) if not place or floor <= place <= length
        )

    def mark(self, positions: Collection[int]) -> None:
        """Name the positions to go back to later: recurrent states of others are let go."""
        self._marks = tuple(positions)

    def _wait(self) -> None:
        """Wait until everything that the cache holds is computed."""
        mx.eval([entry.state for entry in self.cache])

    def _step(self, tokens: mx.array) -> mx.array:
        """One forward pass over tokens [1, T]; the logits [1, V] after the last."""
        logits: mx.array = self.model(tokens, cache=self.cache)
        position = self.sequence.length
        if self.states:
            # What was before this step is needed when the step turns out to be one too many.
            kept = {0, position - tokens.shape[1], *sorted(self._marks)[-MAX_KEPT:]}
            states = {place: each for place, each in self.states.items() if place in kept}
            self.states = {**states, position: self.cache.recurrent_states()}
        self._finished = position
        return logits[:, -1, :]
