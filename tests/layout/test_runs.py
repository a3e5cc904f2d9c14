"""Runs of a ring and growth by doubling, exhaustively over small numbers."""

from __future__ import annotations

import pytest

from mlx_kvcache.layout import Run, StepPlan, grown_rows, wrap


@pytest.mark.parametrize("size", range(1, 13))
def test_wrap_visits_the_slots_of_its_positions_in_order(size: int) -> None:
    for start in range(3 * size + 1):
        for length in range(size + 1):
            got = wrap(start, length, size)
            slots = [run.start + offset for run in got for offset in range(run.length)]
            assert slots == [position % size for position in range(start, start + length)]
            assert all(run.length > 0 for run in got)
            assert len(got) <= 2


def test_wrap_gives_one_run_where_one_is_enough() -> None:
    assert wrap(0, 5, 5) == (Run(0, 5),)
    assert wrap(5, 5, 5) == (Run(0, 5),)
    assert wrap(7, 3, 5) == (Run(2, 3),)
    assert wrap(7, 4, 5) == (Run(2, 3), Run(0, 1))
    assert wrap(7, 0, 5) == ()
    assert wrap(7, -3, 5) == ()


def test_grown_rows_doubles_clamps_and_never_shrinks() -> None:
    for limit in range(1, 70):
        for needed in range(limit + 1):
            for current in range(limit + 1):
                rows = grown_rows(current, needed, limit)
                assert max(needed, current) <= rows <= limit
                if needed <= current:
                    assert rows == current
                    continue
                start = max(current, 1)
                doubled = next(start << k for k in range(8) if start << k >= needed)
                assert rows == min(doubled, limit)


@pytest.mark.parametrize("initial", [0, 1, 3, 512, 1000])
@pytest.mark.parametrize("limit", [1, 1000, 32_768, 40_000])
def test_growing_one_by_one_copies_at_most_twice_the_rows(initial: int, limit: int) -> None:
    rows = min(initial, limit)
    growths = copied = 0
    for needed in range(1, limit + 1):
        grown = grown_rows(rows, needed, limit)
        if grown != rows:
            growths += 1
            copied += rows
            rows = grown
    assert rows == limit
    assert growths <= limit.bit_length() + 1
    assert copied < 2 * limit


@pytest.mark.parametrize("limit", [2**31 - 1, 2**31 - 2])
def test_growing_stops_at_the_limit_however_large(limit: int) -> None:
    assert grown_rows(2**30, 2**30 + 1, limit) == limit
    assert grown_rows(0, limit, limit) == limit


def test_a_plan_ends_behind_its_last_token() -> None:
    assert StepPlan(5, 3, (), 3, (), 0, True).end == 8
