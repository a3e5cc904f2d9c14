"""The tokens of one sequence over a cache: what is kept, what is fed, and what refusals leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.control.history import TokenHistory, common_prefix
from mlx_kvcache.errors import ConfigError, RewindError

TOKENS = st.lists(st.integers(0, 2), max_size=12)


class Cache:
    """Keeps the tokens themselves as its rows; `floor` is as far back as it can go, but for 0."""

    def __init__(self, floor: int = 0, places: tuple[int, ...] | None = None) -> None:
        self.rows: list[int] = []
        self.floor = floor
        self.places = places

    @property
    def length(self) -> int:
        return len(self.rows)

    def rewind(self, position: int) -> None:
        below = [place for place in self.places or () if place <= position]
        reaches = self.places is None or position in self.places or position == self.length
        if position and (position < self.floor or not reaches):
            raise RewindError("cannot", nearest=max(below, default=0))
        del self.rows[position:]


def filled(*tokens: int, **choices: Any) -> tuple[TokenHistory, Cache]:
    cache = Cache(**choices)
    history = TokenHistory(cache)
    cache.rows += history.continue_as(tokens)
    return history, cache


@given(TOKENS, TOKENS)
def test_the_common_prefix_is_that_of_a_comparison_one_by_one(first, second):
    wanted = 0
    while wanted < min(len(first), len(second)) and first[wanted] == second[wanted]:
        wanted += 1
    assert common_prefix(first, second) == common_prefix(tuple(second), first) == wanted


@given(st.lists(TOKENS.filter(bool), min_size=1, max_size=6), st.integers(0, 6))
def test_the_cache_holds_the_target_after_what_is_to_be_fed(targets, floor):
    cache = Cache(floor)
    history = TokenHistory(cache)
    for target in targets:
        before = list(cache.rows)
        fed = history.continue_as(target)
        assert 1 <= len(fed) <= len(target)
        if not floor:
            assert len(fed) == len(target) - min(common_prefix(before, target), len(target) - 1)
        cache.rows += fed
        assert cache.rows == history.tokens == target
        assert (history.held, history.pending) == (len(target), [])


def test_only_what_is_new_is_fed_and_at_least_one_token():
    history, cache = filled(1, 2, 3)
    assert history.shared([1, 2, 3, 4]) == 3
    assert history.continue_as([1, 2, 3, 4, 5]) == [4, 5]
    cache.rows += [4, 5]
    assert history.continue_as([1, 2, 3, 4, 5]) == [5]
    assert cache.rows == [1, 2, 3, 4]
    # What is not in the cache is not shared, though it is among the tokens.
    assert history.shared([1, 2, 3, 4, 5]) == 4
    history.tokens.append(6)
    assert history.pending == [5, 6]


def test_a_cache_that_cannot_go_back_starts_again_from_what_it_reaches():
    history, cache = filled(1, 2, 3, 4, floor=3)
    assert history.continue_as([1, 2, 9]) == [1, 2, 9]
    assert cache.rows == []
    history, cache = filled(1, 2, 3, 4, places=(0, 1))
    assert history.continue_as([1, 2, 9]) == [2, 9]
    assert cache.rows == [1]


def test_settling_takes_back_a_step_that_ran_ahead():
    history, cache = filled(1, 2)
    cache.rows.append(3)
    history.settle()
    assert (history.tokens, cache.rows) == ([1, 2], [1, 2])
    cache.rows.append(3)
    cache.floor = 3
    history.settle()
    assert (history.tokens, history.pending, cache.rows) == ([1, 2], [1, 2], [])


def test_becoming_another_history_keeps_what_both_begin_with():
    history, cache = filled(1, 2, 3)
    history.become([1, 2])
    assert (history.tokens, cache.rows, history.pending) == ([1, 2], [1, 2], [])
    history.become([1, 5, 6])
    assert (history.tokens, cache.rows, history.pending) == ([1, 5, 6], [1], [5, 6])
    history.become([])
    assert (history.tokens, cache.rows) == ([], [])


def test_rewinding_takes_the_cache_along():
    history, cache = filled(1, 2, 3)
    history.tokens += [4, 5]
    history.rewind(4)
    assert (history.tokens, cache.rows) == ([1, 2, 3, 4], [1, 2, 3])
    history.rewind(1)
    assert history.tokens == cache.rows == [1]


def test_refusals_change_nothing():
    history, cache = filled(1, 2, 3, floor=2)
    for position in (1, 4, -1):
        with pytest.raises(RewindError):
            history.rewind(position)
        assert history.tokens == cache.rows == [1, 2, 3]
    with pytest.raises(ConfigError, match="at least one"):
        history.continue_as([])
    assert history.tokens == cache.rows == [1, 2, 3]


def test_a_fork_goes_its_own_way():
    history, cache = filled(1, 2)
    twin_cache = Cache()
    twin_cache.rows = list(cache.rows)
    twin = history.fork(twin_cache)
    twin.tokens.append(3)
    assert (twin.tokens, twin.pending) == ([1, 2, 3], [3])
    assert (history.tokens, history.pending) == ([1, 2], [])
