"""The integers: decode first, prompts in turns, first come first served, nothing overcommitted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kvcache.engine import Scheduler
from mlx_kvcache.engine.scheduler import Chunk
from mlx_kvcache.errors import CapacityError, ConfigError


def started(scheduler: Scheduler, *requests: tuple[int, int, int]) -> None:
    for number, prefill, need in requests:
        scheduler.add(number)
        scheduler.start(number, prefill, need)


def test_decodes_come_first_and_prompts_share_the_rest():
    scheduler = Scheduler(step_tokens=10, max_active=4)
    started(scheduler, (0, 0, 5), (1, 30, 40), (2, 3, 9), (3, 0, 5))
    plan = scheduler.plan()
    assert plan.decodes == (0, 3)
    assert plan.chunks == (Chunk(1, 8),)
    scheduler.fed(1, 8)
    plan = scheduler.plan()
    # The long prompt has had its turn.
    assert plan.chunks == (Chunk(2, 3), Chunk(1, 5))
    assert plan.tokens == 10
    scheduler.fed(2, 3)
    assert scheduler.plan().decodes == (0, 2, 3)


def test_a_request_starts_when_its_whole_need_is_free():
    scheduler = Scheduler(8, 2)
    scheduler.add(7)
    assert scheduler.fits(20, free=20)
    assert not scheduler.fits(21, free=20)
    scheduler.start(7, 4, 12)
    assert scheduler.reserved == 12
    assert scheduler.fits(8, free=20)
    assert not scheduler.fits(9, free=20)
    scheduler.fed(7, 4)
    # What was fed is no longer free, nor reserved.
    assert scheduler.reserved == 8
    assert not scheduler.fits(9, free=16)
    scheduler.remove(7)
    assert scheduler.reserved == 0


def test_the_queue_is_first_come_first_served_and_can_be_left():
    scheduler = Scheduler(8, 1)
    for number in range(3):
        scheduler.add(number)
    with pytest.raises(ConfigError, match="not the next"):
        scheduler.start(1, 1, 1)
    scheduler.remove(1)
    scheduler.start(0, 1, 1)
    assert scheduler.waiting == (2,)
    assert not scheduler.fits(1, free=100), "one request at once"
    scheduler.remove(0)
    assert scheduler.fits(1, free=100)


def test_more_than_was_reserved_is_refused():
    scheduler = Scheduler(8, 1)
    started(scheduler, (0, 4, 4))
    with pytest.raises(CapacityError):
        scheduler.fed(0, 5)
    assert scheduler.plan().chunks == (Chunk(0, 4),)


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
    scheduler = Scheduler(max_active + spare_tokens, max_active)
    needs = [prompt + answer for prompt, answer in requests]
    capacity = max(needs) + spare
    used: dict[int, int] = {}
    answered = [0] * len(requests)
    order = []
    for number in range(len(requests)):
        scheduler.add(number)
    for _ in range(10_000):
        while (head := scheduler.head) is not None and scheduler.fits(
            needs[head], capacity - sum(used.values())
        ):
            scheduler.start(head, requests[head][0], needs[head])
            used[head] = 0
            order.append(head)
        plan = scheduler.plan()
        if not plan.tokens:
            break
        assert plan.tokens <= scheduler.step_tokens
        assert len(plan.decodes) <= max_active
        assert len({chunk.request for chunk in plan.chunks} | set(plan.decodes)) == len(
            plan.chunks
        ) + len(plan.decodes)
        for number, tokens in (*plan.chunks, *((number, 1) for number in plan.decodes)):
            scheduler.fed(number, tokens)
            used[number] += tokens
        assert sum(used.values()) + scheduler.reserved <= capacity
        for number in plan.decodes:
            answered[number] += 1
            if answered[number] == requests[number][1]:
                scheduler.remove(number)
                del used[number]
    assert answered == [answer for _, answer in requests]
    assert order == sorted(order)
    assert not scheduler.active
    assert not scheduler.waiting
