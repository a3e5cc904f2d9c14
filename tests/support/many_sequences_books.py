"""What a cache of many sequences may hold after an interrupted verb: as before, or as after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from tests.support.many_sequences_driver import Driver, Token


class Books(NamedTuple):
    """The rows of each sequence, and the highest end that it ever had."""

    truth: dict[int, list[Token]]
    high_water: dict[int, int]

    @classmethod
    def of(cls, driver: Driver[Any]) -> Books:
        """What the driver expects now."""
        truth = {sequence: list(rows) for sequence, rows in driver.truth.items()}
        return cls(truth, {sequence: driver.high_water[sequence] for sequence in truth})

    def copy(self) -> Books:
        truth = {sequence: list(rows) for sequence, rows in self.truth.items()}
        return Books(truth, dict(self.high_water))

    def with_new(self) -> Books:
        """With an empty sequence of the lowest unused id."""
        books = self.copy()
        identity = self.lowest_unused()
        books.truth[identity], books.high_water[identity] = [], 0
        return books

    def with_fork(self, sequence: int, length: int) -> Books:
        books = self.copy()
        identity = self.lowest_unused()
        books.truth[identity] = list(self.truth[sequence][:length])
        books.high_water[identity] = self.high_water[sequence] if length else 0
        return books

    def without(self, sequence: int) -> Books:
        books = self.copy()
        del books.truth[sequence], books.high_water[sequence]
        return books

    def rewound(self, sequence: int, position: int) -> Books:
        books = self.copy()
        del books.truth[sequence][position:]
        if position == 0:
            books.high_water[sequence] = 0
        return books

    def lowest_unused(self) -> int:
        return next(i for i in range(len(self.truth) + 1) if i not in self.truth)


def expect(driver: Driver[Any], books: Books) -> None:
    """Let the driver expect this."""
    held = books.copy()
    driver.truth, driver.high_water = held.truth, held.high_water


def expect_one_of(driver: Driver[Any], possible: Sequence[Books]) -> Books:
    """Find which of these the cache holds, row by row; it must hold one of them."""
    failure: AssertionError | None = None
    for books in possible:
        expect(driver, books)
        take_high_water(driver, possible)
        try:
            driver.check()
        except AssertionError as error:
            failure = failure or error
        else:
            return books
    assert failure is not None
    raise failure


def take_high_water(driver: Driver[Any], possible: Sequence[Books]) -> None:
    """The high water of each sequence, which an interrupt may find at either of two values."""
    cache = driver.cache
    if not isinstance(cache, MLXBatchedSequenceCache):
        return
    for sequence in driver.truth:
        if sequence not in cache.sequences:
            continue
        high = cache.sequence(sequence).layout.high_water
        allowed = {books.high_water[sequence] for books in possible if sequence in books.high_water}
        assert high in allowed, f"sequence {sequence} has the high water {high}, not of {allowed}"
        driver.high_water[sequence] = high
