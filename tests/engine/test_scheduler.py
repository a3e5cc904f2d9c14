"""The integers: decode first, prompts in turns, first come first served, nothing overcommitted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kvcache.engine.scheduler import Scheduler
from mlx_kvcache.errors import ConfigError


def started(scheduler: Scheduler[int], *requests: tuple[int, int]) -> None:
    for number, unread in requests:
        scheduler.add(number)
        scheduler.start(number, unread)


def test_decodes_come_first_and_prompts_share_the_rest():
    scheduler = Scheduler[int](step_tokens=10, max_active=4)
    started(scheduler, (0, 0), (1, 30), (2, 3), (3, 0))
    assert scheduler.decodes == (0, 3)
    assert scheduler.chunks() == [(1, 8)]
    scheduler.left(1, 22)
    # The long prompt has had its turn.
    assert scheduler.chunks() == [(2, 3), (1, 5)]
    scheduler.left(2, 0)
    assert scheduler.decodes == (0, 2, 3)
    assert scheduler.chunks() == [(1, 7)]


def test_a_request_starts_when_its_whole_need_is_free():
    scheduler = Scheduler[int](8, 2)
    scheduler.add(7)
    assert scheduler.fits(20, free=20)
    assert not scheduler.fits(21, free=20)


def test_what_was_interrupted_may_be_called_again():
    scheduler = Scheduler[int](8, 2)
    started(scheduler, (0, 4))
    scheduler.add(1)
    # What `start` does first, and no more.
    scheduler.unread[1] = 3
    scheduler.start(1, 3)
    scheduler.left(1, 3)
    assert (list(scheduler.waiting), scheduler.chunks()) == ([], [(0, 4), (1, 3)])
    scheduler.left(0, 0)
    scheduler.left(0, 0)
    assert (scheduler.decodes, scheduler.chunks()) == ((0,), [(1, 3)])
    scheduler.remove(0)
    scheduler.remove(0)
    assert (scheduler.decodes, scheduler.unread) == ((), {1: 3})


def test_the_queue_is_first_come_first_served_and_can_be_left():
    scheduler = Scheduler[int](8, 1)
    for number in range(3):
        scheduler.add(number)
    with pytest.raises(ConfigError, match="not the next"):
        scheduler.start(1, 1)
    scheduler.remove(1)
    scheduler.start(0, 1)
    assert list(scheduler.waiting) == [2]
    assert not scheduler.fits(1, free=100), "one request at once"
    scheduler.remove(0)
    assert scheduler.fits(1, free=100)


@pytest.mark.parametrize(
    ("step_tokens", "max_active"), [(0, 1), (4, 5), (True, 1), (4, 0), (4, 1.5)]
)
def test_impossible_limits_are_refused(step_tokens, max_active):
    with pytest.raises(ConfigError):
        Scheduler(step_tokens, max_active)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 40),
)
def test_every_request_is_served_within_the_limits(requests, max_active, spare_tokens, spare):
    """A simulation: `spare` cells more than the largest request needs, so that all must wait."""
    scheduler = Scheduler[int](max_active + spare_tokens, max_active)
    needs = [prompt + answer for prompt, answer in requests]
    capacity = max(needs) + spare
    used: dict[int, int] = {}
    answered = [0] * len(requests)
    order = []
    for number in range(len(requests)):
        scheduler.add(number)
    for _ in range(10_000):
        # What runs has its whole need reserved.
        while scheduler.waiting and scheduler.fits(
            needs[head := scheduler.waiting[0]], capacity - sum(map(needs.__getitem__, used))
        ):
            scheduler.start(head, requests[head][0])
            used[head] = 0
            order.append(head)
        decodes, chunks = scheduler.decodes, scheduler.chunks()
        if not decodes and not chunks:
            break
        assert len(decodes) + sum(tokens for _, tokens in chunks) <= scheduler.step_tokens
        assert len(decodes) <= max_active
        assert len({number for number, _ in chunks} | set(decodes)) == len(chunks) + len(decodes)
        for number, tokens in chunks:
            scheduler.left(number, scheduler.unread[number] - tokens)
        for number, tokens in (*chunks, *((number, 1) for number in decodes)):
            used[number] += tokens
            assert used[number] <= needs[number]
        assert sum(used.values()) <= capacity
        for number in decodes:
            answered[number] += 1
            if answered[number] == requests[number][1]:
                scheduler.remove(number)
                assert used.pop(number) == needs[number]
    assert answered == [answer for _, answer in requests]
    assert order == sorted(order)
    assert not scheduler.unread
    assert not scheduler.waiting
