"""Drives a cache of many sequences against a dictionary of lists: sequence -> its rows.

Every row ever written holds fresh random numbers, different for each layer, so that a row of
another sequence, position or layer is told apart by its bytes. The rows that attention is given
are compared with the dictionary, query by query, and so are the numbers that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache.arguments import AttendOptions
from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.errors import KVCacheError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.layout.steps import DeclaredStep
from mlx_kvcache.store.rows import RowView
from tests.support.arrays import numbers, raw, visible_rows

HEADS, GROUPS, KEY_DIM, VALUE_DIM = 2, 2, 4, 3
SCALE = 0.37
TOLERANCE = 1e-5

CacheType = TypeVar("CacheType", MLXCellCache, MLXBatchedSequenceCache)


class Row(NamedTuple):
    """One token's keys [H, D] and values [H, Dv] in one layer."""

    key: np.ndarray
    value: np.ndarray

    @property
    def identity(self) -> bytes:
        return self.key.tobytes() + self.value.tobytes()


Token = tuple[Row, ...]  # by layer


class Call(NamedTuple):
    """What attention was given."""

    queries: Any
    keys: Any
    values: Any
    mask: Mask

    def computed(self) -> Call:
        """With numbers in the place of arrays."""
        queries, keys, values, mask = self
        return Call(numbers(queries), numbers(keys), numbers(values), mask)


def geometry_of(windows: Sequence[int], shared: Iterable[int] = ()) -> CacheGeometry:
    shared = set(shared)
    return CacheGeometry(
        tuple(
            LayerGeometry(
                LayerPolicy.from_window(window), HEADS, KEY_DIM, VALUE_DIM, index in shared
            )
            for index, window in enumerate(windows)
        )
    )


def attention(query: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """One query [Hq, D] over these rows, in float64."""
    answers = []
    for head, one in enumerate(query.astype(np.float64)):
        own = head // GROUPS
        scores = np.array([row.key[own] @ one for row in rows]) * SCALE
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        answers.append(weights @ np.array([row.value[own] for row in rows], np.float64))
    return np.array(answers)


class Driver(Generic[CacheType]):
    """A cache, the truth about it, and every operation checked against the truth."""

    def __init__(
        self,
        cache_class: type[CacheType],
        windows: Sequence[int] = (0, 3, 0, 5),
        *,
        capacity: int = 40,
        initial_capacity: int = 2,
        spare: int = 2,
        shared: Iterable[int] = (3,),
        max_context: int | None = None,
        kv_dtype: str | None = None,
        seed: int = 0,
    ) -> None:
        self.windows = tuple(windows)
        self.config = CacheConfig(capacity, kv_dtype, initial_capacity, spare, max_context)
        self.shared = frozenset(shared)
        self.cache: CacheType = cache_class(geometry_of(windows, self.shared), self.config)
        self.truth: dict[int, list[Token]] = {}
        self.high_water: dict[int, int] = {}
        self.random = np.random.default_rng(seed)
        self.seen = 0

    @property
    def layers(self) -> range:
        return range(len(self.windows))

    @property
    def room(self) -> int:
        return self.cache.free

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32)

    def row(self, *shape: int) -> np.ndarray:
        """Random numbers that the storage dtype holds exactly."""
        drawn, dtype = self.normal(*shape), self.config.kv_dtype
        return drawn if dtype is None else numbers(mx.array(drawn).astype(getattr(mx, dtype)))

    def token(self) -> Token:
        return tuple(Row(self.row(HEADS, KEY_DIM), self.row(HEADS, VALUE_DIM)) for _ in self.layers)

    def new(self) -> int:
        identity = self.cache.new()
        expected = next(i for i in range(len(self.truth) + 1) if i not in self.truth)
        assert identity == expected, "not the lowest unused id"
        self.truth[identity] = []
        self.high_water[identity] = 0
        return identity

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        identity = self.cache.fork(sequence, up_to)
        assert identity not in self.truth
        length = len(self.truth[sequence]) if up_to is None else up_to
        self.truth[identity] = self.truth[sequence][:length]
        self.high_water[identity] = self.high_water[sequence] if length else 0
        return identity

    def remove(self, sequence: int) -> None:
        self.cache.remove(sequence)
        del self.truth[sequence]

    def rewind(self, sequence: int, position: int) -> None:
        self.cache.rewind(sequence, position)
        del self.truth[sequence][position:]
        if position == 0:
            self.high_water[sequence] = 0

    def reachable(self, sequence: int, position: int) -> bool:
        """Whether a sequence can be put back to a position that it holds.

        Cells keep every row. The slots of a ring hold the newest rows below the highest end ever
        written, and those of the window before the position must be among them.
        """
        if isinstance(self.cache, MLXCellCache) or position == 0:
            return True
        high, spare = self.high_water[sequence], self.config.spare
        return all(
            position - window + 1 >= high - (window + spare - 1) or high <= window + spare - 1
            for window in self.windows
            if window > 1
        )

    def declare(self, spans: Sequence[tuple[int, int]]) -> DeclaredStep:
        """Declare a step, and check what is answered."""
        step = self.cache.declare_step(spans)
        lengths = {sequence: len(rows) for sequence, rows in self.truth.items()}
        positions, owners, last = [], [], {}
        for sequence, count in spans:
            for _ in range(count):
                positions.append(lengths[sequence])
                lengths[sequence] += 1
                last[sequence] = len(owners)
                owners.append(sequence)
        assert step.positions == tuple(positions)
        assert step.token_sequences == tuple(owners)
        assert step.tokens == len(owners)
        assert dict(zip(step.sequences, step.last_tokens, strict=True)) == last
        assert np.array(self.cache.step_positions()).tolist() == positions
        return step

    def step(self, spans: Sequence[tuple[int, int]]) -> DeclaredStep:
        """Run a step through every layer."""
        step = self.declare(spans)
        self.run(step, self.layers)
        return step

    def run(self, step: DeclaredStep, layers: Iterable[int]) -> list[Token]:
        """Give a declared step to these layers; the truth has its rows from then on."""
        tokens = [self.token() for _ in range(step.tokens)]
        for sequence, token in zip(step.token_sequences, tokens, strict=True):
            self.truth[sequence].append(token)
            high = max(self.high_water[sequence], len(self.truth[sequence]))
            self.high_water[sequence] = high
        for layer in layers:
            self.attend(layer, step, tokens)
        return tokens

    def rows_of(self, layer: int, tokens: Sequence[Token]) -> tuple[mx.array, mx.array]:
        keys = np.stack([token[layer].key for token in tokens], axis=1)[None]
        values = np.stack([token[layer].value for token in tokens], axis=1)[None]
        return mx.array(keys), mx.array(values)

    def attend(self, layer: int, step: DeclaredStep, tokens: Sequence[Token]) -> None:
        """One layer of a step, checked; a shared layer is asked in every way there is."""
        keys, values = self.rows_of(layer, tokens)
        self._checked(layer, step, lambda q: self.cache.attend(layer, q, keys, values, SCALE))
        if layer in self.shared:
            self._checked(layer, step, lambda q: self.cache.attend_again(layer, q, SCALE))
            self._checked(layer, step, lambda q: self.cache.attend(layer, q, keys, values, SCALE))

    def _checked(
        self, layer: int, step: DeclaredStep, attend: Callable[[mx.array], mx.array]
    ) -> None:
        queries = self.normal(1, HEADS * GROUPS, step.tokens, KEY_DIM)
        with recorded() as recordings:
            computed = attend(mx.array(queries))
        # At once: each evaluation of its own waits for the thread of a stream.
        mx.eval(computed, [part for call in recordings for part in call if part is not None])
        answer, calls = numbers(computed), [call.computed() for call in recordings]
        assert answer.shape == (1, HEADS * GROUPS, step.tokens, VALUE_DIM)
        token_of = {queries[0, :, index].tobytes(): index for index in range(step.tokens)}
        met = []
        for call in calls:
            for query in range(call.queries.shape[2]):
                index = token_of[call.queries[0, :, query].tobytes()]
                met.append(index)
                rows = self.expected(layer, step, index)
                self._compare(call, query, rows)
                wanted = attention(queries[0, :, index], rows)
                off = np.abs(answer[0, :, index] - wanted).max()
                assert off < TOLERANCE, f"layer {layer}, token {index}: off by {off}"
        assert sorted(met) == list(range(step.tokens)), "a query was not attended once"

    def expected(self, layer: int, step: DeclaredStep, index: int) -> list[Row]:
        """The rows that token `index` of a step may see, in the order of their positions."""
        sequence, position = step.token_sequences[index], step.positions[index]
        window = self.windows[layer]
        first = max(0, position - window + 1) if window else 0
        return [token[layer] for token in self.truth[sequence][first : position + 1]]

    def _compare(self, call: Call, query: int, rows: Sequence[Row]) -> None:
        queries, held = call.queries.shape[2], call.keys.shape[2]
        seen = np.flatnonzero(visible_rows(call.mask, query, queries, held))
        identities = [Row(call.keys[0, :, row], call.values[0, :, row]).identity for row in seen]
        self.seen += len(seen)
        assert sorted(identities) == sorted(row.identity for row in rows), "other rows are seen"

    def refused(self, error: type[KVCacheError], call: Callable[[], object]) -> None:
        """A call that must be refused with this error and change nothing at all."""
        before = observe(self.cache)
        with pytest.raises(KVCacheError) as refusal:
            call()
        assert refusal.type is error, f"{refusal.type.__name__}: {refusal.value}"
        assert observe(self.cache) == before, f"refused, yet changed: {refusal.value}"

    def check(self) -> None:
        """Everything that must hold between operations."""
        cache = self.cache
        assert cache.sequences == tuple(sorted(self.truth))
        assert cache.used + cache.free == cache.capacity
        for sequence, rows in self.truth.items():
            assert cache.position(sequence) == len(rows)
        if isinstance(cache, MLXCellCache):
            check_cells(cache, self.truth)
        else:
            check_batched(cache, self.truth, self.windows)
            for sequence, rows in self.truth.items():
                floor = cache.rewind_floor(sequence)
                for position in range(1, len(rows) + 1):
                    assert (position >= floor) == self.reachable(sequence, position)


@contextmanager
def recorded() -> Any:
    """Record every call of attention in both caches."""
    from mlx_kvcache.cache import batched as batched_cache
    from mlx_kvcache.cache import cells as cell_cache
    from mlx_kvcache.cache.attend import attend_view

    calls: list[Call] = []

    def attend(queries: mx.array, view: RowView, mask: Mask, options: AttendOptions) -> mx.array:
        keys, values = view.dense()
        calls.append(Call(queries, keys, values, mask))
        return attend_view(queries, view, mask, options)

    with (
        patch.object(cell_cache, "attend_view", attend),
        patch.object(batched_cache, "attend_view", attend),
    ):
        yield calls


def check_cells(cache: MLXCellCache, truth: dict[int, list[Token]]) -> None:
    """No cell is lost, none leaks, the end is tight, and each row is where its owners look."""
    layout = cache.layout
    held: dict[int, tuple[int, set[int], Token]] = {}
    for sequence, tokens in truth.items():
        cells = layout.cells(sequence)
        assert len(cells) == len(tokens)
        for position, (cell, token) in enumerate(zip(cells, tokens, strict=True)):
            known = held.setdefault(cell, (position, set(), token))
            assert known[0] == position
            assert known[2] is token, "sequences share a cell but not what it holds"
            assert sequence not in known[1], "a sequence has a cell twice"
            known[1].add(sequence)
    distinct = {id(token) for tokens in truth.values() for token in tokens}
    assert len(held) == len(distinct), "what is shared is held once"
    assert cache.used == len(held)
    assert cache.used_end == max(held, default=-1) + 1
    assert cache.used_end <= cache.capacity
    for cell in range(cache.used_end + 2):
        position, owners, _ = held.get(cell, (-1, set(), None))
        assert layout.owners(cell) == tuple(sorted(owners))
        assert layout.position_of_cell(cell) == position
    for layer in range(len(cache.geometry.layers)):
        pool = cache.pool(layer)
        if held:
            assert pool.keys is not None
            assert pool.values is not None
            assert cache.used_end <= pool.rows <= cache.capacity
            keys, values = numbers(pool.keys), numbers(pool.values)
            for cell, (_, _, token) in held.items():
                row = Row(keys[0, :, cell], values[0, :, cell])
                assert row.identity == token[layer].identity, "a cell holds another row"


def check_batched(
    cache: MLXBatchedSequenceCache, truth: dict[int, list[Token]], windows: Sequence[int]
) -> None:
    """Each sequence holds its own rows: all of them, or those that its window can reach."""
    assert cache.used == sum(map(len, truth.values()))
    for sequence, tokens in truth.items():
        own = cache.sequence(sequence)
        assert [layer.offset for layer in own.layers] == [len(tokens)] * len(windows)
        for layer, window in zip(own.layers, windows, strict=True):
            first = max(0, len(tokens) - window + 1) if window else 0
            if not tokens[first:]:
                continue
            keys, values = numbers(layer.keys), numbers(layer.values)
            size = window + cache.config.spare - 1 if window else 0
            for position in range(first, len(tokens)):
                slot = position % size if size else position
                row = Row(keys[0, :, slot], values[0, :, slot])
                assert row.identity == tokens[position][layer.index].identity


def observe(cache: MLXCellCache | MLXBatchedSequenceCache) -> tuple[Any, ...]:
    """All that can be seen of a cache, with every byte that it holds."""
    layout = cache.layout
    seen: list[Any] = [
        cache.sequences,
        cache.used,
        cache.free,
        cache.nbytes,
        dict(cache.unfinished),
        layout.now._replace(members={}, kept=dict.fromkeys(layout.now.kept)),
        [cache.position(sequence) for sequence in cache.sequences],
        [raw(array) for array in cache.state],
    ]
    if isinstance(cache, MLXCellCache):
        cells = cache.layout
        seen += [
            cells.used_end,
            list(cells._owners),
            list(cells._positions),
            sorted(hole for hole in cells._holes if hole < cells.used_end),
            [(list(m.cells), list(m.breaks)) for m in cells.members.values()],
            cells.placed_cells.tolist(),
        ]
    else:
        for sequence in cache.sequences:
            own = cache.sequence(sequence)
            offsets = [layer.offset for layer in own.layers]
            seen.append((own.length, own.layout.high_water, own.rewind_floor, offsets))
    return tuple(seen)
