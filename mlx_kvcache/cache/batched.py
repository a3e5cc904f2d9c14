"""MLXBatchedSequenceCache: many sequences, each with rows and rings of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx

from mlx_kvcache.cache.arguments import AttendOptions
from mlx_kvcache.cache.attend import attend_view
from mlx_kvcache.cache.growth import RowForm, Wanted, affordable_lengths, check_lengths
from mlx_kvcache.cache.layer import LayerState
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.sequence import MLXSequenceCache, SequenceState, restore_rings
from mlx_kvcache.cache.shared import MLXSharedCache
from mlx_kvcache.cache.snapshot import Snapshot, check_fits
from mlx_kvcache.errors import MemoryLimitError, StepError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.layout.batched import BatchedLayout, Kept
from mlx_kvcache.layout.steps import DeclaredStep
from mlx_kvcache.store.rows import KeysValues, RowView

KIND = "batched"

#: What each sequence of a batched cache holds, by id.
BatchedState = dict[int, Snapshot[SequenceState]]
Layout = BatchedLayout[MLXSequenceCache]
#: A layer, and for each sequence of a step its rows and its mask.
Answers = tuple[int, list[RowView], list[Mask]]


class BatchedStep:
    """A placed step, made once and shared by the layers; takes its tokens apart by sequence.

    A sequence with several spans gets their tokens as one: they continue each other.
    layers: for each cache layer, those of the sequences. writing: the layer that was written last,
    whose write was interrupted if it is still unwritten.
    """

    def __init__(self, step: DeclaredStep, members: list[MLXSequenceCache]) -> None:
        self.step = step
        self.layers = list(zip(*[cache.layers for cache in members], strict=True))
        self.unwritten = set(range(len(self.layers)))
        self.writing: int | None = None
        # Between the write of a layer and its attention.
        self.answers: Answers | None = None
        self._masks: dict[LayerPolicy, list[Mask]] = {}
        self._cuts = [span.first for span in step.spans[1:]]
        self._in_order = len(step.starts) == len(step.spans)
        if self._in_order:
            self._tokens = [span.tokens for span in step.spans]
            return
        self._lengths = [span.tokens for span in step.spans]
        index: dict[int, list[int]] = {sequence: [] for sequence in step.starts}
        for number, span in enumerate(step.spans):
            index[span.sequence].append(number)
        self._spans = list(index.values())
        self._tokens = [sum(self._lengths[i] for i in spans) for spans in self._spans]

    def masks(self, layer: int, policy: LayerPolicy) -> list[Mask]:
        """The mask of each sequence, to be asked for before a layer of the policy is written."""
        masks = self._masks.get(policy)
        if masks is None:
            owns = zip(self.layers[layer], self._tokens, strict=True)
            masks = self._masks[policy] = [own.make_mask(tokens) for own, tokens in owns]
        return masks

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


class MLXBatchedSequenceCache(MLXSharedCache[Layout, BatchedStep]):
    """The KV cache of many sequences that share nothing but a capacity.

    Each is an `MLXSequenceCache`: full layers read their own history and no other, sliding
    windows really are rings. A step attends each sequence over its own rows, so that its cost
    is the sum of the histories. A fork copies its rows at the first write after it. Rings that a
    step overwrites further than their spare rows reach are copied, and kept until it is finished.

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

    @property
    def state(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.state]

    @property
    def nbytes(self) -> int:
        """Bytes allocated; rows that a fork has not copied yet count for each holder."""
        return sum(cache.nbytes for cache in self._caches)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the rows that hold a remembered position."""
        return sum(cache.nbytes_used for cache in self._caches)

    def sequence(self, sequence: int) -> MLXSequenceCache:
        """The cache of one sequence, to be looked at. Raises `UnknownSequenceError`."""
        self.position(sequence)
        return self.layout.now.members[sequence]

    def rewind_floor(self, sequence: int) -> int:
        """The lowest position, other than 0, that `rewind` can reach now."""
        return self.layout.rewind_floor(sequence)

    def new(self) -> int:
        return self.layout.add(MLXSequenceCache(self.geometry, self._member_config))

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence with the same history, up to a position.

        The rows are shared until either of the two is written, which copies them. Takes as
        much of the capacity as it has positions. Raises `UnknownSequenceError`, `RewindError`
        (not held, or overwritten by a ring), `StepError` or `CapacityError`.
        """
        length = self.layout.check_fork(sequence, up_to)
        identity = self.layout.add_fork(self.layout.now.members[sequence].fork(length))
        self._running = None
        return identity

    def remove(self, sequence: int) -> None:
        """Forget a sequence and free its rows. Raises `UnknownSequenceError`."""
        self.layout.remove(sequence)
        self._running = None

    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on.

        Raises `UnknownSequenceError`, `RewindError` for a position that is not held or whose
        window a ring has overwritten, or `StepError` for one within an unfinished step.
        """
        layout = self.layout
        layout.check_rewind(sequence, position)
        layout.begin_rewind(sequence, position)
        self._running = None
        cache, kept = layout.now.members[sequence], layout.now.kept.get(sequence)
        if kept is not None:
            restore_rings(cache, kept.length, kept.high_water, kept.rows)
        cache.rewind(position)
        layout.rewound(sequence, position)

    def snapshot(self) -> Snapshot[BatchedState]:
        """What all sequences hold now, for `restore`; copies no row until one is written.

        Raises `StepError` while a step is unfinished.
        """
        self.layout.check_finished("take a snapshot")
        members = self.layout.now.members
        held = {sequence: cache.snapshot() for sequence, cache in members.items()}
        arrays = tuple(array for each in held.values() for array in each.arrays)
        return Snapshot(KIND, self.geometry, self.config, held, arrays)

    def restore(self, snapshot: Snapshot[BatchedState]) -> None:
        """Hold what a cache of the same geometry and config held when the snapshot was taken.

        Raises `SnapshotError`, and changes nothing, for a snapshot of another cache.
        """
        check_fits(snapshot, KIND, self.geometry, self.config)
        members = {}
        for sequence, held in snapshot.held.items():
            members[sequence] = MLXSequenceCache(self.geometry, self._member_config)
            members[sequence].restore(held)
        self.layout = Layout(self.capacity, self.config.max_context, members)
        self._running = None

    def _check_room(self, ends: Mapping[int, int], begun: Sequence[int]) -> None:
        members = self.layout.now.members
        pairs = [(members[sequence], end) for sequence, end in ends.items()]
        pairs += [(MLXSequenceCache(self.geometry, self._member_config), end) for end in begun]
        # Of what is yet to be written it is known what the others hold.
        forms = (cache.form for cache in self._caches)
        form = next(filter(None, forms), None) or RowForm.least(self.config.kv_dtype)
        check_lengths([Wanted(own.growth, end, own.form or form, own.form) for own, end in pairs])

    @property
    def _caches(self) -> Iterable[MLXSequenceCache]:
        return self.layout.now.members.values()

    def _make_layout(self) -> Layout:
        return Layout(self.config.capacity, self.config.max_context)

    def _begin_step(self, step: DeclaredStep, rows: KeysValues | None) -> BatchedStep:
        members = self.layout.now.members
        caches, grows = [], False
        for sequence, end in step.ends.items():
            cache = members[sequence]
            caches.append(cache)
            grows = grows or end > cache.layout.room
        if grows:
            self._make_room(list(zip(caches, step.ends.values(), strict=True)), rows)
        if step.tokens > self.config.spare:
            self._keep_rings(step)
        return BatchedStep(step, caches)

    def _make_room(self, ends: list[tuple[MLXSequenceCache, int]], rows: KeysValues | None) -> None:
        """Let sequences grow together, as far as it is known of what form their rows are.

        Raises `MemoryLimitError`, and changes nothing. Each asks for itself otherwise.
        """
        wanted = []
        for cache, end in ends:
            held = cache.form
            form = held or RowForm.first(self.config.kv_dtype, rows)
            if form is not None and end > cache.layout.room:
                wanted.append(Wanted(cache.growth, end, form, held))
        if wanted:
            for each, length in zip(wanted, affordable_lengths(wanted), strict=True):
                each.growth.take(length)

    def _keep_rings(self, step: DeclaredStep) -> None:
        """Keep the rings that a step overwrites so far that they could not go back before it."""
        kept = {}
        for sequence, start in step.starts.items():
            cache = self.layout.now.members[sequence]
            high_water = cache.layout.high_water
            end = max(high_water, step.ends[sequence])
            rings: dict[int, LayerState] = {
                layer.index: layer.hold()
                for layer, layout in zip(cache.layers, cache.layout.layers, strict=True)
                if layout.rewind_floor(end) > start > 0
            }
            if rings:
                # What is kept belongs to no stream and to no thread.
                mx.eval([state.rows.state for state in rings.values()])
                kept[sequence] = Kept(start, high_water, rings)
        if kept:
            self.layout.keep(kept)

    def _check_single_answer(self, step: DeclaredStep) -> None:
        if len(step.starts) > 1:
            raise StepError(
                f"a step over {len(step.starts)} sequences has no single answer in this layout, "
                "where each has rows of its own; use attend"
            )

    def _write(self, running: BatchedStep, layer: int, keys: mx.array, values: mx.array) -> None:
        if running.writing in running.unwritten:
            raise StepError(
                "the write of this step was interrupted, and some sequences hold it already; "
                "abandon_step and declare it again"
            )
        masks = running.masks(layer, self.geometry.layers[layer].policy)
        running.writing = layer
        parts = zip(running.layers[layer], running.split(keys), running.split(values), strict=True)
        try:
            running.answers = layer, [own.write(*rows) for own, *rows in parts], masks
        except MemoryLimitError:
            # Nothing was written: of what form rows are is unknown in the first step of one
            # sequence only, and all others were asked for before.
            running.writing = None
            raise
        # Here, since its sequences would refuse a layer that is written twice.
        running.unwritten.discard(layer)

    def _attend(
        self, running: BatchedStep, layer: int, queries: mx.array, options: AttendOptions
    ) -> mx.array:
        _, held, masks = self._answers(running, layer)
        parts = zip(running.split(queries), held, masks, strict=True)
        answers = [attend_view(own, view, mask, options) for own, view, mask in parts]
        running.answers = None
        return running.join(answers)

    def _single_answer(self, running: BatchedStep, layer: int) -> KeysValues:
        _, (view,), _ = self._answers(running, layer)
        running.answers = None
        return view.dense()

    def _mask(self, running: BatchedStep, layer: int) -> Mask:
        return running.masks(layer, self.geometry.layers[layer].policy)[0]

    def _answers(self, running: BatchedStep, layer: int) -> Answers:
        """What the newest write of a layer was answered with, or reads again."""
        if running.answers is not None and running.answers[0] == layer:
            return running.answers
        masks = running.masks(layer, self.geometry.layers[layer].policy)
        return layer, [own.read_again() for own in running.layers[layer]], masks
