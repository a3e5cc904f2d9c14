"""MLXBatchedSequenceCache: many sequences, each with pools and rings of its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx

from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.cache.shared import AttendOptions, MLXSharedCache, attend_rows
from mlx_kvcache.errors import StepError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.layout.batched import BatchedLayout
from mlx_kvcache.layout.steps import DeclaredStep

KeysValues = tuple[mx.array, mx.array]


class _Spans:
    """Takes the tokens of a step apart by sequence, and puts them together again.

    A sequence with several spans gets their tokens as one: they continue each other.
    """

    def __init__(self, step: DeclaredStep) -> None:
        self._cuts = [span.first for span in step.spans[1:]]
        self._lengths = [span.tokens for span in step.spans]
        index: dict[int, list[int]] = {sequence: [] for sequence in step.starts}
        for number, span in enumerate(step.spans):
            index[span.sequence].append(number)
        self._spans = list(index.values())
        self._in_order = len(self._spans) == len(step.spans)
        self.tokens = [sum(self._lengths[i] for i in spans) for spans in self._spans]

    def split(self, array: mx.array) -> list[mx.array]:
        """The tokens of each sequence, from [1, H, T, D]."""
        pieces = list(mx.split(array, self._cuts, axis=2)) if self._cuts else [array]
        if self._in_order:
            return pieces
        return [mx.concatenate([pieces[i] for i in spans], axis=2) for spans in self._spans]

    def join(self, arrays: list[mx.array]) -> mx.array:
        """[1, H, T, D] in the order of the step, from the tokens of each sequence."""
        if not self._in_order:
            pieces: dict[int, mx.array] = {}
            for spans, array in zip(self._spans, arrays, strict=True):
                ends = list(accumulate(self._lengths[i] for i in spans))
                pieces.update(zip(spans, mx.split(array, ends[:-1], axis=2), strict=True))
            arrays = [pieces[i] for i in range(len(pieces))]
        return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)


class MLXBatchedSequenceCache(MLXSharedCache[BatchedLayout, list[KeysValues]]):
    """The KV cache of many sequences that share nothing but a capacity.

    Each is an `MLXSequenceCache`: full layers read their own history and no other, sliding
    windows really are rings. A step attends each sequence over its own rows, so that its cost
    is the sum of the histories. A fork copies its rows at the first write after it.

    `config.capacity` bounds the sum of the lengths, `max_context` a single one. Raises
    `GeometryError` or `ConfigError` when the arguments do not fit together.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        config: CacheConfig | None = None,
    ) -> None:
        super().__init__(geometry, config)
        own = min(self.config.max_context or self.capacity, self.capacity)
        self._member_config = replace(self.config, capacity=own)
        self._caches: dict[int, MLXSequenceCache] = {}
        self._running: _Spans
        self._members: list[MLXSequenceCache] = []
        self._masks: dict[LayerPolicy, list[Mask]] = {}

    @property
    def state(self) -> list[mx.array]:
        return [array for cache in self._caches.values() for array in cache.state]

    @property
    def nbytes(self) -> int:
        """Bytes allocated; rows that a fork has not copied yet count for each holder."""
        return sum(cache.nbytes for cache in self._caches.values())

    @property
    def nbytes_used(self) -> int:
        """Bytes of the rows that hold a remembered position."""
        return sum(cache.nbytes_used for cache in self._caches.values())

    def sequence(self, sequence: int) -> MLXSequenceCache:
        """The cache of one sequence, to be looked at. Raises `UnknownSequenceError`."""
        self.position(sequence)
        return self._caches[sequence]

    def rewind_floor(self, sequence: int) -> int:
        """The lowest position, other than 0, that `rewind` can reach now."""
        return self.sequence(sequence).rewind_floor

    def new(self) -> int:
        cache = MLXSequenceCache(self.geometry, self._member_config)
        identity = self.layout.add(cache.layout)
        self._caches[identity] = cache
        return identity

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence with the same history, up to a position.

        The arrays are shared until either of the two is written, which copies them. Takes as
        much of the capacity as it has positions. Raises `UnknownSequenceError`, `RewindError`
        (not held, or overwritten by a ring), `StepError` or `CapacityError`.
        """
        length = self.layout.check_fork(sequence, up_to)
        origin = self._caches[sequence]
        facts = {id(fact): fact for fact in (origin.geometry, origin.config)}
        twin = copy.deepcopy(origin, facts)
        twin.rewind(length)
        identity = self.layout.add(twin.layout)
        self.layout.forked()
        self._caches[identity] = twin
        self._end_step()
        return identity

    def remove(self, sequence: int) -> None:
        """Forget a sequence and free its pools. Raises `UnknownSequenceError`."""
        self.layout.remove(sequence)
        del self._caches[sequence]
        self._end_step()

    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on.

        Raises `UnknownSequenceError`, `RewindError` for a position that is not held or whose
        window a ring has overwritten, or `StepError` for one within an unfinished step.
        """
        self.layout.check_rewind(sequence, position)
        self._caches[sequence].rewind(position)
        self.layout.rewound(sequence)
        self._end_step()

    def _make_layout(self) -> BatchedLayout:
        return BatchedLayout(self.config.capacity, self.config.max_context)

    def _begin_step(self, step: DeclaredStep) -> None:
        self._running = _Spans(step)
        self._members = [self._caches[sequence] for sequence in step.starts]
        self._masks = {}

    def _end_step(self) -> None:
        # The running step must not keep the pools of a removed sequence alive.
        self._members = []
        self._masks = {}

    def _check_single_answer(self, step: DeclaredStep) -> None:
        if len(step.starts) > 1:
            raise StepError(
                f"a step over {len(step.starts)} sequences has no single answer in this layout, "
                "where each has rows of its own; use attend"
            )

    def _write(self, layer: int, keys: mx.array, values: mx.array) -> list[KeysValues]:
        self._ask_masks(layer)
        parts = zip(self._running.split(keys), self._running.split(values), strict=True)
        return [
            own.update_and_fetch(*rows)
            for own, rows in zip(self._layers(layer), parts, strict=True)
        ]

    def _rows(self, layer: int, dtypes: tuple[mx.Dtype, mx.Dtype]) -> list[KeysValues]:
        rows = (own.keys_and_values() for own in self._layers(layer))
        return [(keys.astype(dtypes[0]), values.astype(dtypes[1])) for keys, values in rows]

    def _attend(
        self, layer: int, rows: list[KeysValues], queries: mx.array, options: AttendOptions
    ) -> mx.array:
        answers = [
            attend_rows(own, keys, values, mask, options)
            for own, (keys, values), mask in zip(
                self._running.split(queries), rows, self._ask_masks(layer), strict=True
            )
        ]
        return self._running.join(answers)

    def _single(self, rows: list[KeysValues]) -> KeysValues:
        return rows[0]

    def _mask(self, layer: int) -> Mask:
        return self._ask_masks(layer)[0]

    def _layers(self, layer: int) -> list[SequenceLayer]:
        return [cache.layers[layer] for cache in self._members]

    def _ask_masks(self, layer: int) -> list[Mask]:
        """The mask of each sequence, asked for before the first layer of its policy is written."""
        policy = self.geometry.layers[layer].policy
        masks = self._masks.get(policy)
        if masks is None:
            masks = self._masks[policy] = [
                own.make_mask(tokens)
                for own, tokens in zip(self._layers(layer), self._running.tokens, strict=True)
            ]
        return masks
