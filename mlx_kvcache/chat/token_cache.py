"""A model, its cache, and which tokens the cache holds: fed, sampled, rewound and forked as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.chat.recurrent_states import RecurrentStates
from mlx_kvcache.control.registry import CacheSession
from mlx_kvcache.errors import RewindError
from mlx_kvcache.integrations.mlx_lm import PromptCache

Sampler = Callable[[mx.array], mx.array]

#: Tokens after which MLX's pool of freed buffers is emptied, as mlx-lm does.
_CLEAR_INTERVAL = 256


class TokenCache:
    """The cache of one sequence with the tokens in it.

    `held` is what the cache holds, token by token, once `settle` has run. A step that was broken
    off, and the one step by which `generate` runs ahead, are put right by `settle`.

    The cache must be empty. Its key is in the registry until `close`.
    """

    def __init__(self, model: Module, cache: PromptCache) -> None:
        self.model = model
        self.cache = cache
        self.held: list[int] = []
        self.states = RecurrentStates(cache)
        self.session = CacheSession.around(cache.sequence).open()
        self._marks: tuple[int, ...] = ()

    @property
    def sequence(self) -> MLXSequenceCache:
        """The cache behind the list that the model takes."""
        return self.cache.sequence

    def fork(self) -> TokenCache:
        """A copy that shares every array with this one until either of them writes to it."""
        self.settle(len(self.held))
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        twin.held = list(self.held)
        twin.states = self.states.fork(twin.cache)
        twin.session = CacheSession.around(twin.cache.sequence).open()
        return twin

    def close(self) -> None:
        """Take the cache out of the registry. May be repeated."""
        self.session.close()

    def feed(self, tokens: Sequence[int]) -> None:
        """Run the model over some more tokens in one step, and wait for it."""
        self._step(mx.array([list(tokens)]))
        self.held.extend(tokens)
        self.wait()
        mx.clear_cache()

    def generate(self, first: int, count: int, sampler: Sampler) -> Iterator[int]:
        """Feed the token `first`, then sample up to `count` tokens, and feed each of those.

        The step of a token is on its way by the time that token is yielded.
        """
        sampled = self._sample(self._step(mx.array([[first]])), sampler)
        mx.async_eval(sampled)  # type: ignore[no-untyped-call]
        self.held.append(first)
        for number in range(1, count + 1):
            logits = self._step(sampled[:, None])
            if number < count:
                following = self._sample(logits, sampler)
                mx.async_eval(following)  # type: ignore[no-untyped-call]
            token = int(cast(int, sampled.item()))
            self.held.append(token)
            yield token
            if number < count:
                sampled = following
            if number % _CLEAR_INTERVAL == 0:
                mx.clear_cache()

    def settle(self, limit: int) -> int:
        """Go back to the longest prefix, of at most `limit` tokens, that can be reached.

        Answers its length: 0 when nothing else is left. Also ends whatever step was broken off.
        """
        # A token is held only once every layer has finished its step.
        target = self._nearest(min(limit, len(self.held)))
        self._go_back(target)
        self.wait()
        return target

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on; nothing, when no more are held.

        Raises `RewindError`, and changes nothing, when the layers cannot go back that far.
        """
        self.settle(len(self.held))
        if position >= len(self.held):
            return
        if not self.states.reaches(position):
            reachable = ", ".join(str(place) for place in self.reachable_states())
            raise RewindError(
                f"cannot rewind from {len(self.held)} to {position}: the model has recurrent "
                "layers, whose state goes back only to where it was recorded, the start of a "
                f"turn; {reachable} can be reached"
            )
        self._go_back(position)

    def reachable_states(self) -> tuple[int, ...]:
        """The recorded positions of the recurrent states to which all other layers can go too."""
        return tuple(place for place in self.states.positions if self._nearest(place) == place)

    def mark(self, positions: Collection[int]) -> None:
        """Name the positions to go back to later: recurrent states of others are let go."""
        self._marks = tuple(positions)

    def wait(self) -> None:
        """Wait until everything that the cache holds is computed."""
        mx.eval(self._arrays())

    def _arrays(self) -> list[Any]:
        return [entry.state for entry in self.cache]

    def _step(self, tokens: mx.array) -> mx.array:
        """One forward pass over tokens [1, T]; the logits [1, V] after the last."""
        logits: mx.array = self.model(tokens, cache=self.cache)
        if self.states.exist:
            position = self.sequence.length
            self.states.record(position)
            # The one before this step is needed when the step turns out to be one too many.
            self.states.keep(self._marks, position - tokens.shape[1])
        return logits[:, -1, :]

    def _sample(self, logits: mx.array, sampler: Sampler) -> mx.array:
        return sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def _nearest(self, limit: int) -> int:
        """The highest position, at most `limit`, that every layer can go back to."""
        floor = self.sequence.rewind_floor
        places = self.states.positions if self.states.exist else (limit,)
        return max((place for place in places if floor <= place <= limit), default=0)

    def _go_back(self, position: int) -> None:
        # In this order, an interruption anywhere leaves what the next call puts right.
        self.sequence.rewind(position)
        self.states.restore(position)
        del self.held[position:]
