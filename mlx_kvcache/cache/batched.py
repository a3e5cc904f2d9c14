"""MLXBatchedSequenceCache: many sequences, each with rows and rings of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from mlx_kvcache.cache.arguments import AttendOptions
from mlx_kvcache.cache.attend import attend_view
from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.sequence import MLXSequenceCache, SequenceState
from mlx_kvcache.cache.shared import MLXSharedCache
from mlx_kvcache.cache.snapshot import Snapshot, check_fits
from mlx_kvcache.errors import StepError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.layout.batched import BatchedLayout
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.layout.steps import DeclaredStep
from mlx_kvcache.store.rows import KeysValues, RowView

KIND = "batched"


class BatchedState(NamedTuple):
    """What a batched cache holds: its sequences by id, and what each of them holds."""

    layout: BatchedLayout
    sequences: dict[int, Snapshot[SequenceState]]


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


class MLXBatchedSequenceCache(MLXSharedCache[BatchedLayout]):
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
        # Between the write of a layer and its attention.
        self._rows: tuple[int, list[KeysValues]] | None = None

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

        The rows are shared until either of the two is written, which copies them. Takes as
        much of the capacity as it has positions. Raises `UnknownSequenceError`, `RewindError`
        (not held, or overwritten by a ring), `StepError` or `CapacityError`.
        """
        length = self.layout.check_fork(sequence, up_to)
        twin = self._caches[sequence].fork(length)
        identity = self.layout.add(twin.layout)
        self.layout.forked()
        self._caches[identity] = twin
        self._end_step()
        return identity

    def remove(self, sequence: int) -> None:
        """Forget a sequence and free its rows. Raises `UnknownSequenceError`."""
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

    def snapshot(self) -> Snapshot[BatchedState]:
        """What all sequences hold now, for `restore`; copies no row until one is written.

        Raises `StepError` while a step is unfinished.
        """
        self.layout.check_finished("take a snapshot")
        held = {sequence: cache.snapshot() for sequence, cache in self._caches.items()}
        arrays = tuple(array for each in held.values() for array in each.arrays)
        state = BatchedState(self.layout.with_members({}), held)
        return Snapshot(KIND, self.geometry, self.config, state, arrays)

    def restore(self, snapshot: Snapshot[BatchedState]) -> None:
        """Hold what a cache of the same geometry and config held when the snapshot was taken.

        Raises `SnapshotError`, and changes nothing, for a snapshot of another cache.
        """
        check_fits(snapshot, KIND, self.geometry, self.config)
        layout, sequences = snapshot.held
        caches = {}
        for sequence, held in sequences.items():
            caches[sequence] = MLXSequenceCache(self.geometry, self._member_config)
            caches[sequence].restore(held)
        self.layout = layout.with_members({key: cache.layout for key, cache in caches.items()})
        self._caches = caches
        self._end_step()

    def _make_layout(self) -> BatchedLayout:
        return BatchedLayout(self.config.capacity, self.config.max_context)

    def _begin_step(self, step: DeclaredStep) -> None:
        self._running = _Spans(step)
        self._members = [self._caches[sequence] for sequence in step.starts]
        self._masks = {}

    def _end_step(self) -> None:
        # The running step must not keep the rows of a removed sequence alive.
        self._members = []
        self._masks = {}
        self._rows = None

    def _check_single_answer(self, step: DeclaredStep) -> None:
        if len(step.starts) > 1:
            raise StepError(
                f"a step over {len(step.starts)} sequences has no single answer in this layout, "
                "where each has rows of its own; use attend"
            )

    def _write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._rows = None
        self._ask_masks(layer)
        split = self._running.split
        parts = zip(self._layers(layer), split(keys), split(values), strict=True)
        self._rows = layer, [own.update_and_fetch(*rows) for own, *rows in parts]

    def _attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        answers = [
            attend_view(own, RowView(*rows, (Run(0, rows[0].shape[2]),)), mask, options)
            for own, rows, mask in zip(
                self._running.split(queries),
                self._answers(layer),
                self._ask_masks(layer),
                strict=True,
            )
        ]
        self._rows = None
        return self._running.join(answers)

    def _single_answer(self, layer: int) -> KeysValues:
        (rows,) = self._answers(layer)
        self._rows = None
        return rows

    def _mask(self, layer: int) -> Mask:
        return self._ask_masks(layer)[0]

    def _answers(self, layer: int) -> list[KeysValues]:
        """What the newest write of a layer was answered with, or reads again."""
        if self._rows is not None and self._rows[0] == layer:
            return self._rows[1]
        return [own.keys_and_values() for own in self._layers(layer)]

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
