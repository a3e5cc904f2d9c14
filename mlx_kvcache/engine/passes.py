"""Forward passes over several sequences, of which one may fail without harm to the others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kvcache.engine.requests import FAILED, LENGTH, STOP, Event, Outcome, Request, ended
from mlx_kvcache.engine.sessions import Sessions
from mlx_kvcache.errors import ConfigError, NonFiniteError, RewindError
from mlx_kvcache.integrations.attention import FlatModel
from mlx_kvcache.integrations.sampling import Chooser, RandomState


class Row(NamedTuple):
    """The next tokens of one sequence, which stands at `start`."""

    sequence: int
    start: int
    tokens: Sequence[int]


class Result(NamedTuple):
    """The logits [1, vocabulary] after a row and its greedy token, or its failure."""

    logits: mx.array | None = None
    greedy: int | None = None
    error: Exception | None = None


_READ = Result()
_RUNS = "a request that runs has a session, which is open"


class Passes:
    """Runs rows through the model on a cache, and keeps failures apart.

    A value that is no number in one sequence's rows reaches every sequence that is attended over
    them in the same pass: 0 times NaN is NaN. So where rows are shared, a pass with such rows is
    taken back for them, the cache is defragmented, which drops the bad ones, and each of those
    rows runs alone. What finite rows computed is right, since a NaN that reached them would show.
    """

    def __init__(self, model: FlatModel, sessions: Sessions) -> None:
        self._model = model
        self._sessions = sessions
        self._cache = sessions.cache

    def read(self, chunks: Sequence[tuple[Request, int]]) -> list[Exception | None]:
        """Read so many tokens of each prompt on, and answer what failed it. Raises as `run`."""
        rows = []
        for request, count in chunks:
            session = request.session
            assert session is not None and session.sequence is not None, _RUNS  # noqa: PT018
            start = session.history.held
            rows.append(Row(session.sequence, start, session.tokens[start : start + count]))
        return [result.error for result in self.run(rows, with_logits=False)]

    def decode(self, requests: Sequence[Request]) -> list[Outcome]:
        """Feed the newest token of each request, and decide what follows. Raises as `run`."""
        rows = []
        histories = []
        for request in requests:
            session = request.session
            assert session is not None and session.sequence is not None, _RUNS  # noqa: PT018
            tokens = session.history.tokens
            histories.append(tokens)
            rows.append(Row(session.sequence, len(tokens) - 1, tokens[-1:]))
        outcomes = []
        results = self.run(rows, with_logits=True)
        for request, tokens, result in zip(requests, histories, results, strict=True):
            error, token, random = result.error, result.greedy, request.random
            if error is None and not request.chooser.is_greedy:
                # A draw that is lost by an interruption must not move the state on.
                random = copy.copy(random)
                try:
                    token = _draw(result, tokens, request.chooser, random)
                except Exception as raised:
                    error = raised
            if error is not None:
                outcomes.append(ended(request, FAILED, error))
                continue
            count = len(request.tokens) + 1
            reason = LENGTH if count == request.max_tokens else None
            if token in request.stop:
                reason = STOP
            outcomes.append(Outcome(Event(request, token, reason), count, None, random))
        return outcomes

    def run(self, rows: Sequence[Row], with_logits: bool) -> list[Result]:
        """The result of each row; only rows of one token have logits.

        A failed row's sequence stands where it stood, unless a ring was overwritten. Raises only
        `KeyboardInterrupt` and the like.
        """
        raised = False
        try:
            results = self._attempt(rows, with_logits)
        except Exception as error:
            raised, results = True, [Result(error=error)] * len(rows)
        except BaseException:
            self._take_back(rows)
            raise
        for result in results:
            if result.error is not None:
                return self._apart(rows, with_logits, results, raised)
        return results

    def _attempt(self, rows: Sequence[Row], with_logits: bool) -> list[Result]:
        spans = []
        tokens: list[int] = []
        for row in rows:
            spans.append((row.sequence, len(row.tokens)))
            tokens += row.tokens
        self._cache.declare_step(spans)
        logits, finite = self._model.forward(self._cache, mx.array(tokens, mx.int32))
        chosen: Any = None
        if with_logits:
            finite = finite & mx.isfinite(mx.logsumexp(logits.astype(mx.float32), axis=-1))
            greedy = mx.argmax(logits, axis=-1)
            mx.eval(finite, greedy)
            chosen = greedy.tolist()
        else:
            # Logits are lazy: what nobody asks for is not computed.
            mx.eval(finite, self._cache.state)
        flags: Any = finite.tolist()
        results = []
        first = 0
        for row in rows:
            end = first + len(row.tokens)
            if not all(flags[first:end]):
                results.append(_not_finite())
            elif with_logits:
                results.append(Result(logits[first:end], chosen[first]))
            else:
                results.append(_READ)
            first = end
        return results

    def _apart(
        self, rows: Sequence[Row], with_logits: bool, results: list[Result], raised: bool
    ) -> list[Result]:
        """The results once those that failed were run alone, where that may help."""
        bad = [row for row, result in zip(rows, results, strict=True) if result.error is not None]
        lost = self._take_back(bad)
        if not raised:
            self._sessions.defragment()
        if len(rows) == 1 or not (raised or self._sessions.share_rows):
            return results
        return [
            self.run([row], with_logits)[0] if row in bad and row not in lost else result
            for row, result in zip(rows, results, strict=True)
        ]

    def _take_back(self, rows: Sequence[Row]) -> list[Row]:
        """Put sequences back to where they stood; answers those that a ring has overwritten."""
        lost = []
        for row in rows:
            unfinished = row.sequence in self._cache.unfinished
            if unfinished or self._cache.position(row.sequence) != row.start:
                try:
                    self._cache.rewind(row.sequence, row.start)
                except RewindError:
                    lost.append(row)
        if not lost:
            # What was declared and not placed.
            self._cache.abandon_step()
        return lost


def _draw(
    result: Result, tokens: Sequence[int], chooser: Chooser, random: RandomState | None
) -> int:
    assert result.logits is not None, "a result without an error has logits"
    if random is None:
        answer = chooser.choose(result.logits, tokens)
    else:
        with random.in_use():
            answer = chooser.choose(result.logits, tokens)
            # The state that is left behind is one of the results.
            mx.eval(answer)
    token = int(answer.tolist()[0])  # type: ignore[index, arg-type]
    vocabulary = result.logits.shape[1]
    if not 0 <= token < vocabulary:
        raise ConfigError(f"the sampler chose token {token}; there are {vocabulary} token ids")
    return token


def _not_finite() -> Result:
    return Result(
        error=NonFiniteError(
            "the model's values or logits for this request are not finite numbers; check the "
            "weights, or try a wider dtype"
        )
    )
