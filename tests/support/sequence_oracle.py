"""A brute-force oracle for `MLXSequenceCache`: a dictionary of rows by position.

Every row ever written holds fresh random numbers, so a row of another position, or one that was
rewound and written again, is told apart by its bytes. `Session` drives one cache for each start
form with the same calls, demands equal answers, and compares them with the dictionary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import GeometryError, PositionError, RewindError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer
from tests.support.arrays import numbers, raw, visible_rows

FORMS = ("array", "integer")
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def make_cache(
    geometry: CacheGeometry, config: CacheConfig, form: str = "array"
) -> MLXSequenceCache:
    """A cache of mlx-lm layers whose decode steps use this form of start."""
    with patch.dict(os.environ, MLX_KVCACHE_START=form):
        return MLXSequenceCache(geometry, config, MLXLMLayer)


def simple_geometry(*windows: int, **changes: Any) -> CacheGeometry:
    """Layers of these windows, small and alike."""
    shape: dict[str, Any] = {"kv_heads": 2, "key_dim": 3, "value_dim": 2, **changes}
    return CacheGeometry(
        tuple(LayerGeometry(LayerPolicy.from_window(window), **shape) for window in windows)
    )


def rounded(array: np.ndarray, *dtypes: mx.Dtype) -> np.ndarray:
    """The numbers after passing through these dtypes."""
    if all(dtype == mx.float32 for dtype in dtypes):
        return array
    through = mx.array(array)
    for dtype in dtypes:
        through = through.astype(dtype)
    return numbers(through)


def observe(cache: MLXSequenceCache) -> tuple[Any, ...]:
    """All that can be seen of a cache, with every byte that it holds."""
    return (
        cache.length,
        cache.layout.high_water,
        cache.rewind_floor,
        cache.nbytes,
        cache.nbytes_used,
        [
            (layer.offset, layer.rows, layer.rows_held, raw(layer.keys), raw(layer.values))
            for layer in cache.layers
        ],
    )


@dataclass(frozen=True)
class Shape:
    """One layer of a session."""

    window: int
    kv_heads: int = 1
    key_dim: int = 2
    value_dim: int = 2
    shared: bool = True

    def geometry(self) -> LayerGeometry:
        policy = LayerPolicy.from_window(self.window)
        return LayerGeometry(policy, self.kv_heads, self.key_dim, self.value_dim, self.shared)


@dataclass(frozen=True)
class Question:
    """How the mask of a step is asked for.

    window: narrower or wider than the layer's own, None to leave it. decoys: other token counts
    for which a mask is asked as well, before and after the real one.
    """

    window: int | None = None
    as_array: bool = False
    decoys: tuple[int, ...] = ()


class Truth:
    """The rows of one layer, by position, as they were stored."""

    def __init__(self, shape: Shape, storage: mx.Dtype | None) -> None:
        self.shape = shape
        self.fixed = storage
        self.key_dtype = self.value_dtype = storage
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []

    def store(self, keys: np.ndarray, values: np.ndarray, dtypes: tuple[mx.Dtype, ...]) -> None:
        if not self.rows:
            self.key_dtype = self.fixed or dtypes[0]
            self.value_dtype = self.fixed or dtypes[1]
        keys = rounded(keys, dtypes[0], self.key_dtype)
        values = rounded(values, dtypes[1], self.value_dtype)
        for row in range(keys.shape[2]):
            self.rows.append((keys[:, :, row], values[:, :, row]))

    def rows_as(self, dtypes: tuple[mx.Dtype, ...], first: int, end: int) -> list[bytes]:
        """The bytes of the rows `first` to `end` as answered in the caller's dtypes."""
        if first >= end:
            return []
        keys = rounded(np.stack([row[0] for row in self.rows[first:end]], 2), dtypes[0])
        values = rounded(np.stack([row[1] for row in self.rows[first:end]], 2), dtypes[1])
        return row_bytes(keys, values)


def row_bytes(keys: np.ndarray, values: np.ndarray) -> list[bytes]:
    """One string of bytes for each row of keys and values [B, H, S, D], all of both in it."""
    count = keys.shape[2]
    parts = [np.moveaxis(part, 2, 0).reshape(count, -1) for part in (keys, values)]
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]


class Session:
    """Caches of both start forms, and the truth about them."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        *,
        batch: int = 1,
        capacity: int = 1000,
        spare: int = 3,
        initial_capacity: int = 4,
        kv_dtype: str | None = None,
        forms: Sequence[str] = FORMS,
        seed: int = 0,
    ) -> None:
        geometry = CacheGeometry(tuple(shape.geometry() for shape in shapes))
        config = CacheConfig(capacity, kv_dtype, initial_capacity, spare)
        self.shapes = tuple(shapes)
        self.config = config
        self.caches = [make_cache(geometry, config, form) for form in forms]
        self.batch = batch
        self.dtypes = [(mx.float32, mx.float32)] * len(shapes)
        self.random = np.random.default_rng(seed)
        self.left_behind: list[tuple[MLXSequenceCache, tuple[Any, ...]]] = []
        self.held: list[tuple[mx.array, tuple[Any, ...]]] = []
        self.pending: list[Callable[[], None]] = []
        self.answered: list[mx.array] = []
        self.high_water = self.former_high_water = 0
        # Whether a step has begun that no layer has written.
        self.is_begun = False
        storage = None if kv_dtype is None else DTYPES[kv_dtype]
        self.truths = [Truth(shape, storage) for shape in shapes]

    @property
    def layers(self) -> range:
        return range(len(self.shapes))

    @property
    def length(self) -> int:
        return max(len(truth.rows) for truth in self.truths)

    @property
    def shortest(self) -> int:
        return min(len(truth.rows) for truth in self.truths)

    @property
    def room(self) -> int:
        return self.config.capacity - self.length

    def ring_size(self, layer: int) -> int:
        capacity = self.config.capacity
        window = min(self.shapes[layer].window, capacity)
        return window + min(self.config.spare, capacity) - 1 if window else 0

    def floor(self) -> int:
        """The floor rule, which the layout tests prove slot by slot.

        Of a step that some layers lack, nothing that its start needs is lost.
        """
        return self._floor(self._certain_high_water())

    def _floor(self, high_water: int) -> int:
        floors = [0]
        for layer, shape in enumerate(self.shapes):
            if shape.window > 1 and high_water > self.ring_size(layer):
                floors.append(high_water - min(self.config.spare, self.config.capacity))
        return max(floors)

    def _certain_high_water(self) -> int:
        overwrites = self._floor(self.high_water) > self.shortest
        if (self.is_begun or self.shortest < self.length) and overwrites:
            return self.former_high_water
        return self.high_water

    def rows(self, layer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        shape = self.shapes[layer]
        outer = (self.batch, shape.kv_heads, count)
        return tuple(
            self.random.standard_normal((*outer, dim)).astype(np.float32)
            for dim in (shape.key_dim, shape.value_dim)
        )

    def ask(self, layer: int, count: int, question: Question) -> list[Mask]:
        """The masks of each cache, equal among them."""
        masks = []
        for cache in self.caches:
            for decoy in question.decoys:
                cache.layer(layer).make_mask(decoy, window_size=None, return_array=False)
            masks.append(
                cache.layer(layer).make_mask(
                    count, window_size=question.window, return_array=question.as_array
                )
            )
            for decoy in question.decoys:
                cache.layer(layer).make_mask(decoy, window_size=question.window, return_array=True)
        first = masks[0]
        for other in masks[1:]:
            same = raw(first) == raw(other) if isinstance(first, mx.array) else first == other
            assert same, "the start forms give different masks"
        if question.as_array and count > 1:
            assert isinstance(first, mx.array)
        return masks

    def update(
        self, layer: int, count: int, masks: list[Mask] | None, window: int | None = None
    ) -> None:
        """One layer's part of a step, checked now or when `flush` is called."""
        truth, dtypes = self.truths[layer], self.dtypes[layer]
        position = len(truth.rows)
        keys, values = self.rows(layer, count)
        truth.store(keys, values, dtypes)
        self.high_water = max(self.high_water, position + count)
        given = mx.array(keys).astype(dtypes[0]), mx.array(values).astype(dtypes[1])
        answers = [cache.layer(layer).update_and_fetch(*given) for cache in self.caches]
        again = [self._read_again(cache, layer, position, count) for cache in self.caches]
        mask = None if masks is None else masks[0]
        expected = truth.rows_as(dtypes, 0, position + count)

        def check() -> None:
            for answer in answers:
                assert tuple(array.dtype for array in answer) == dtypes, "not the caller's dtype"
            for number, other in enumerate(answers[1:], 1):
                assert [*map(raw, other)] == [*map(raw, answers[0])], f"start form {number} differs"
            rows = row_bytes(*map(numbers, answers[0]))
            if masks is None:
                first = self._first(layer, position, 0)
                assert rows == expected[first:], f"unasked rows at {position}+{count}"
            else:
                self._check_visible(layer, position, count, rows, expected, mask, window)
            for answer, second in zip(answers, again, strict=True):
                if second is not None:
                    assert [*map(raw, second)] == [*map(raw, answer)], "keys_and_values differ"

        self.pending.append(check)
        self.answered += [array for answer in (*answers, *again) if answer for array in answer]
        for cache in self.caches:
            assert cache.layers[layer].offset == position + count

    def _first(self, layer: int, position: int, narrow: int) -> int:
        windows = [window for window in (self.shapes[layer].window, narrow) if window]
        return max(0, position - min(windows) + 1) if windows else 0

    def _check_visible(
        self,
        layer: int,
        position: int,
        count: int,
        rows: list[bytes],
        expected: list[bytes],
        mask: Mask,
        window: int | None,
    ) -> None:
        for query in range(count):
            chosen = visible_rows(mask, query, count, len(rows))
            got = sorted(row for row, seen in zip(rows, chosen, strict=True) if seen)
            end = position + query + 1
            first = self._first(layer, end - 1, window or 0)
            assert got == sorted(expected[first:end]), (
                f"layer {layer}: the query at {end - 1} does not see exactly {first} to {end - 1}"
            )

    def _read_again(
        self, cache: MLXSequenceCache, layer: int, position: int, count: int
    ) -> tuple[mx.array, mx.array] | None:
        size = self.ring_size(layer)
        joined = size and position + count - self._first(layer, position, 0) > size
        if not joined or self.shapes[layer].shared:
            return cache.layers[layer].keys_and_values()
        try:
            cache.layers[layer].keys_and_values()
        except GeometryError:
            return None
        raise AssertionError("an answer that was not kept was read again")

    def step(
        self,
        count: int,
        questions: Sequence[Question | None] | None = None,
        order: Sequence[int] | None = None,
        reserve: tuple[int, int] | None = None,
    ) -> None:
        """A step of all layers, or of those in `order` (a torn one).

        questions: for each layer how it asks; a layer with None goes by what a layer of its
        policy asked before it, or unasked. reserve: (after this many layers, this length).
        """
        asked: dict[int, tuple[list[Mask], int | None]] = {}
        if self.shortest == self.length and not self.is_begun:
            self.former_high_water = self.high_water
        self.is_begun = False
        for number, layer in enumerate(self.layers if order is None else order):
            if reserve is not None and reserve[0] == number:
                for cache in self.caches:
                    cache.reserve(reserve[1])
            question = questions[layer] if questions else None
            window = self.shapes[layer].window
            if question is not None:
                asked[window] = self.ask(layer, count, question), question.window
            masks, narrow = asked.get(window, (None, None))
            self.update(layer, count, masks, narrow)
        for cache in self.caches:
            assert cache.length == self.length

    def flush(self) -> None:
        """Check what the last steps answered, in an order that evaluates the newest first."""
        self.compute()
        for layer in self.layers:
            self._check_rows_held(layer)
        for array, contents in self.held:
            assert raw(array) == contents, "an array that was answered earlier has changed"
        for cache, before in self.left_behind:
            assert observe(cache) == before, "a copy of the cache was not independent"

    def compute(self) -> None:
        """Compute and check what was answered."""
        mx.eval(self.answered[::-1])
        pending, self.pending, self.answered = self.pending[::-1], [], []
        for check in pending:
            check()

    def _check_rows_held(self, layer: int) -> None:
        """Positions that no newer one has replaced in its slot, though some were rewound."""
        size, position = self.ring_size(layer), len(self.truths[layer].rows)
        replaced = max(0, self.high_water - size) if size else 0
        for cache in self.caches:
            assert cache.layers[layer].rows_held == max(0, position - replaced)

    def hold(self) -> None:
        """Keep the pools' own arrays, as a caller would who was answered with a whole ring."""
        for cache in self.caches:
            self.held += [(array, raw(array)) for array in cache.state]
        self.held = self.held[-8:]

    def fork(self) -> None:
        """Go on with deep copies; the originals must stay as they are."""
        self.flush()
        originals = self.caches
        self.caches = [copy.deepcopy(cache) for cache in originals]
        self.left_behind = [(cache, observe(cache)) for cache in originals]

    def can_rewind(self, position: int) -> bool:
        if position == 0:
            return True
        return self.floor() <= position <= self.shortest

    def rewind(self, position: int, one_by_one: Sequence[int] | None = None) -> bool:
        """Rewind, at once or layer by layer in this order; refused exactly where it must be."""
        self.flush()
        for cache in self.caches:
            before = observe(cache)
            try:
                if one_by_one is None:
                    cache.rewind(position)
                else:
                    for layer in one_by_one:
                        self._trim(cache, layer, position)
            except RewindError:
                assert not self.can_rewind(position), f"refused {position}"
                assert observe(cache) == before, "a refused rewind changed something"
                possible = False
            else:
                assert self.can_rewind(position), f"rewound to {position}"
                possible = True
        if possible:
            self._forget(position)
        return possible

    def _trim(self, cache: MLXSequenceCache, layer: int, position: int) -> None:
        beyond = cache.layers[layer].offset - position
        if beyond > 0:
            assert cache.layers[layer].trim(beyond) == beyond

    def clear(self) -> None:
        self.flush()
        for cache in self.caches:
            cache.clear()
        self._forget(0)

    def _forget(self, position: int) -> None:
        self.high_water = self._certain_high_water()
        self.is_begun = False
        for truth in self.truths:
            del truth.rows[position:]
        if position == 0:
            self.high_water = 0
        for cache in self.caches:
            assert cache.length == position
            assert [layer.offset for layer in cache.layers] == [position] * len(self.shapes)

    def is_refused(self, layer: int, count: int) -> None:
        """This layer's update of `count` rows must be refused and change nothing."""
        keys, values = self.rows(layer, count)
        dtypes = self.dtypes[layer]
        given = mx.array(keys).astype(dtypes[0]), mx.array(values).astype(dtypes[1])
        for cache in self.caches:
            before = observe(cache)
            try:
                cache.layer(layer).update_and_fetch(*given)
            except PositionError:
                assert observe(cache) == before
            else:
                raise AssertionError(f"layer {layer} took {count} rows that do not continue")
