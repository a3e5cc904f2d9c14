"""The tokens of one sequence, and how many of them its cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from mlx_kvcache.errors import ConfigError, RewindError


class RewindableCache(Protocol):
    """A cache of one sequence, or one sequence of a shared cache."""

    @property
    def length(self) -> int:
        """Positions that the cache holds."""

    def rewind(self, position: int) -> None:
        """Forget the positions from `position` on; also ends a step that was broken off.

        Raises `RewindError`, and changes nothing, where the cache cannot go back that far.
        """


class TokenHistory:
    """The tokens that were given and produced, over a cache that holds the first of them.

    tokens: a plain list; append to it what comes next. It is shortened by the verbs below, which
    take the cache along. The cache alone knows its length, so feeding needs no bookkeeping here.

    An interruption anywhere in a verb leaves what the next one puts right.
    """

    def __init__(self, cache: RewindableCache, tokens: Iterable[int] = ()) -> None:
        self.cache = cache
        self.tokens = list(tokens)

    @property
    def held(self) -> int:
        """How many of the tokens the cache holds."""
        return min(self.cache.length, len(self.tokens))

    @property
    def pending(self) -> list[int]:
        """The tokens that the cache does not hold yet: what is fed next."""
        return self.tokens[self.held :]

    def shared(self, target: Sequence[int]) -> int:
        """How many leading tokens of `target` the cache holds."""
        return min(self.held, common_prefix(self.tokens, target))

    def settle(self) -> None:
        """Let the cache hold nothing but tokens of this history.

        Takes back what a step that was broken off, or ran ahead, has written. Where the cache
        cannot go back there it goes further back, and more is pending.
        """
        self._go_back(self.held)

    def make_way(self, target: Sequence[int]) -> None:
        """Let the cache hold no more than it shares with `target`; the tokens stay."""
        self._go_back(self.shared(target))

    def become(self, target: Sequence[int]) -> None:
        """Take `target` as the tokens; the cache keeps what it can of the beginning they share."""
        self.make_way(target)
        self.tokens = list(target)

    def continue_as(self, target: Sequence[int]) -> list[int]:
        """`become` the target, and answer what of it is to be fed: one token at least.

        Raises `ConfigError`, and changes nothing, for an empty target.
        """
        if not target:
            raise ConfigError("there is no token to feed; give at least one")
        self._go_back(min(self.shared(target), len(target) - 1))
        self.tokens = list(target)
        return self.pending

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on.

        Raises `RewindError`, and changes nothing, for a position beyond the tokens, or one to
        which the cache cannot go back.
        """
        if not 0 <= position <= len(self.tokens):
            raise RewindError(
                f"cannot rewind to {position}: there are {len(self.tokens)} tokens; give a "
                "position from 0 to that"
            )
        if position < self.cache.length:
            self.cache.rewind(position)
        del self.tokens[position:]

    def fork(self, cache: RewindableCache) -> TokenHistory:
        """The same tokens over a copy of the cache."""
        return TokenHistory(cache, self.tokens)

    def _go_back(self, position: int) -> None:
        try:
            self.cache.rewind(position)
        except RewindError as error:
            self.cache.rewind(error.nearest)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    one, other = list(first), list(second)
    low, high = 0, min(len(one), len(other)) + 1
    # Slices are compared without Python's interpreter; each round halves what is left.
    middle = high - 1
    while high - low > 1:
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return low
