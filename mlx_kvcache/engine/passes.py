"""Forward passes over several sequences, of which one may fail without harm to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import NonFiniteError, RewindError
from mlx_kvcache.integrations.attention import Cache, FlatModel


class Row(NamedTuple):
    """The next tokens of one sequence."""

    sequence: int
    tokens: Sequence[int]


class Result(NamedTuple):
    """The logits [1, vocabulary] after a row and its greedy token, or its failure.

    A failed row's sequence stands where it stood; `is_lost` when that could not be, and the
    sequence must be removed.
    """

    logits: mx.array | None = None
    greedy: int | None = None
    error: Exception | None = None
    is_lost: bool = False


class Passes:
    """Runs rows through the model on a cache, and keeps failures apart.

    A value that is no number in one sequence's cells reaches every sequence that is attended over
    them in the same pass: 0 times NaN is NaN. So a pass with such rows is taken back for them,
    the cells are defragmented, which drops the bad ones, and each of those rows runs alone.
    What finite rows computed is right, since a NaN that reached them would show.
    """

    def __init__(self, model: FlatModel, cache: Cache) -> None:
        self._model = model
        self._cache = cache

    def run(self, rows: Sequence[Row], with_logits: bool) -> list[Result]:
        """The result of each row. Only `KeyboardInterrupt` and the like are raised."""
        starts = [self._cache.position(row.sequence) for row in rows]
        try:
            results = self._attempt(rows, with_logits)
        except Exception as error:
            lost = self._take_back(rows, starts)
            if len(rows) == 1:
                return [Result(error=error, is_lost=bool(lost))]
            return [
                Result(error=error, is_lost=True)
                if row.sequence in lost
                else self.run([row], with_logits)[0]
                for row in rows
            ]
        except BaseException:
            self._take_back(rows, starts)
            raise
        bad = [index for index, result in enumerate(results) if result.error is not None]
        if not bad:
            return results
        lost = self._take_back([rows[i] for i in bad], [starts[i] for i in bad])
        shares = isinstance(self._cache, MLXCellCache)
        if shares:
            self._cache.defragment()  # type: ignore[attr-defined]
        for index in bad:
            is_lost = rows[index].sequence in lost
            if shares and len(rows) > 1 and not is_lost:
                results[index] = self.run([rows[index]], with_logits)[0]
            else:
                results[index] = results[index]._replace(is_lost=is_lost)
        return results

    def _attempt(self, rows: Sequence[Row], with_logits: bool) -> list[Result]:
        step = self._cache.declare_step([(row.sequence, len(row.tokens)) for row in rows])
        tokens = mx.array([token for row in rows for token in row.tokens], mx.int32)
        logits, healthy = self._model.forward(self._cache, tokens)
        if not with_logits:
            # Logits are lazy: what nobody asks for is not computed.
            mx.eval(healthy, self._cache.state)
            return [Result() if all(flags) else _not_finite() for flags in _by_row(rows, healthy)]
        if len(rows) < step.tokens:
            logits = logits[mx.array(step.last_tokens, mx.int32)]
        finite = mx.isfinite(mx.logsumexp(logits.astype(mx.float32), axis=-1))
        greedy = mx.argmax(logits, axis=-1)
        mx.eval(healthy, finite, greedy)
        chosen: list[Any] = greedy.tolist()  # type: ignore[assignment]
        last: list[Any] = finite.tolist()  # type: ignore[assignment]
        return [
            Result(logits[index : index + 1], chosen[index])
            if all(flags) and last[index]
            else _not_finite()
            for index, flags in enumerate(_by_row(rows, healthy))
        ]

    def _take_back(self, rows: Sequence[Row], starts: Sequence[int]) -> set[int]:
        """Put sequences back to where they stood; answers those that a ring has overwritten."""
        lost = set()
        for row, start in zip(rows, starts, strict=True):
            unfinished = row.sequence in self._cache.unfinished
            if unfinished or self._cache.position(row.sequence) != start:
                try:
                    self._cache.rewind(row.sequence, start)
                except RewindError:
                    lost.add(row.sequence)
        self._cache.layout.retract_declaration()
        return lost


def _by_row(rows: Sequence[Row], flags: mx.array) -> Iterator[list[bool]]:
    values: list[Any] = flags.tolist()  # type: ignore[assignment]
    first = 0
    for row in rows:
        yield values[first : first + len(row.tokens)]
        first += len(row.tokens)


def _not_finite() -> Result:
    return Result(
        error=NonFiniteError(
            "the model's values or logits for this request are not finite numbers; check the "
            "weights, or try a wider dtype"
        )
    )
