"""MLXCellCache: many sequences over one store of cells, forks of which copy nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_kvcache.cache.arguments import AttendOptions
from mlx_kvcache.cache.attend import attend_view
from mlx_kvcache.cache.cell_growth import affordable_cells, cell_form
from mlx_kvcache.cache.growth import RowForm
from mlx_kvcache.cache.masks import Mask, band
from mlx_kvcache.cache.shared import MLXSharedCache
from mlx_kvcache.cache.snapshot import Snapshot, check_fits
from mlx_kvcache.errors import CapacityError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.layout.cells import CellLayout, runs_of_cells
from mlx_kvcache.layout.runs import Run, grown_rows
from mlx_kvcache.layout.steps import DeclaredStep, StepSpan
from mlx_kvcache.store.choice import prefers_array_start
from mlx_kvcache.store.rows import DenseRows, KeysValues, Placement

KIND = "cell"
#: The position of a cell for a sequence that does not own it: after every query.
NOT_OWNED = 2**31 - 1
#: A run is written at once for about what scattering this many single rows costs (measured).
ROWS_WORTH_A_RUN = 8


class CellState(NamedTuple):
    """What a cell cache holds: its sequences and cells, and the rows of each layer."""

    layout: CellLayout
    allocated: int
    layers: tuple[DenseRows, ...]


class MLXCellCache(MLXSharedCache[CellLayout, "CellStep"]):
    """The KV cache of many sequences that may share what they have in common.

    Every layer keeps one store over the cells, which grows by lazy capacity doubling; a token
    takes the lowest free cell, the same in every layer. A fork only adds an owner to cells. All
    queries of a step are attended at once, over the cells that its sequences may see, with a
    mask made once a step for each distinct window. A window hides cells and frees none, so any
    position can be rewound to.

    `config.capacity` counts cells; `config.max_context` limits a single sequence. Raises
    `GeometryError` or `ConfigError` when the arguments do not fit together.
    """

    shares_rows = True

    def __init__(self, geometry: CacheGeometry, config: CacheConfig | None = None) -> None:
        super().__init__(geometry, config)
        config = self.config
        self._stores = [DenseRows() for _ in geometry.layers]
        self._array_start = prefers_array_start(geometry, config)
        self._cells = min(config.initial_capacity, config.capacity)
        # The cells for which there is memory; 0 until that was asked.
        self._room = 0

    @property
    def used_end(self) -> int:
        """The end of the taken cells."""
        return self._settled().used_end

    @property
    def state(self) -> list[mx.array]:
        return [array for store in self._stores for array in store.state]

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the cells that have an owner."""
        return sum(store.nbytes // store.rows * self.used for store in self._stores if store.rows)

    def pool(self, layer: int) -> DenseRows:
        """The rows of one layer, by cell. Raises `LayerIndexError`."""
        self._check_layer(layer)
        self._settled()
        return self._stores[layer]

    def new(self) -> int:
        return self._settled().new()

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence that shares the rows of another up to a position; copies nothing.

        Raises `UnknownSequenceError`, `RewindError` for an `up_to` that is not held, or
        `StepError` for rows of an unfinished step.
        """
        identity = self._settled().fork(sequence, up_to)
        self._running = None
        return identity

    def remove(self, sequence: int) -> None:
        self._settled().remove(sequence)
        self._running = None

    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on; any held position will do.

        Raises `UnknownSequenceError`, `RewindError`, or `StepError` for a position within an
        unfinished step.
        """
        self._settled().rewind(sequence, position)
        self._running = None

    def snapshot(self) -> Snapshot[CellState]:
        """What all sequences hold now, for `restore`; copies no row until one is written.

        Raises `StepError` while a step is unfinished.
        """
        layout = self._settled()
        layout.check_finished("take a snapshot")
        mx.eval(self.state)
        stores = tuple(store.copy() for store in self._stores)
        held = CellState(layout.at_rest(), self._cells, stores)
        return Snapshot(KIND, self.geometry, self.config, held, tuple(self.state))

    def restore(self, snapshot: Snapshot[CellState]) -> None:
        """Hold what a cache of the same geometry and config held when the snapshot was taken.

        Raises `SnapshotError`, and changes nothing, for a snapshot of another cache.
        """
        check_fits(snapshot, KIND, self.geometry, self.config)
        layout, cells, layers = snapshot.held
        stores = [store.copy() for store in layers]
        self._pending = partial(self._hold, layout.at_rest(), cells, stores)
        self._pending()

    def reserve(self, cells: int) -> None:
        """Grow once, now, so that `cells` cells need no further growth.

        Raises `CapacityError`, and changes nothing, when there are not that many, and
        `MemoryLimitError` when they take more memory than can be had.
        """
        if not is_integer(cells, 0):
            raise CapacityError(
                f"a reservation needs a number of cells >= 0, got {shortened(cells)}"
            )
        self._settled()
        if cells > self.capacity:
            raise CapacityError(
                f"cannot reserve {cells} cells: the capacity is {self.capacity}; "
                "make the cache with a larger capacity"
            )
        cells = max(self._cells, cells)
        if cells > self._room:
            self._make_room(cells, cells, None)
        for store in self._stores:
            store.grow(self._cells)

    def _check_room(self, ends: Mapping[int, int], begun: Sequence[int]) -> None:
        layout = self._settled()
        more = sum(end - layout.position(sequence) for sequence, end in ends.items()) + sum(begun)
        cells = min(max(layout.used_end, layout.used + more), self.capacity)
        if cells > max(store.rows for store in self._stores):
            kv_dtype, stores = self.config.kv_dtype, self._stores
            form = cell_form(stores, kv_dtype, None) or RowForm.least(kv_dtype)
            affordable_cells(self.geometry.layers, stores, form, cells, cells, grows=False)

    def defragment(self) -> int:
        """Move the rows together, sequence after sequence, and give spare memory back.

        Answers how many cells were renamed. Sequences, positions and bytes stay what they are.
        Copies the rows of each layer once, one layer after the other. Raises `StepError` while a
        step is unfinished.
        """
        layout = self._settled()
        order = layout.plan_defragment()
        moved = sum(cell != former for cell, former in enumerate(order))
        cells = grown_rows(
            min(self.config.initial_capacity, self.capacity), len(order), self.capacity
        )
        if moved or cells < self._cells:
            self._pending = partial(self._move, order, cells, layout.members, [])
            self._pending()
        return moved

    def cell_map(self, width: int = 64) -> str:
        """A drawing of the cells for people: who owns which, where the holes are."""
        return self._settled().cell_map(width)

    def _make_layout(self) -> CellLayout:
        return CellLayout(self.config.capacity, self.config.max_context)

    def _hold(self, layout: CellLayout, cells: int, stores: list[DenseRows]) -> None:
        """Hold these. May be repeated until it was done."""
        self.layout, self._cells, self._stores, self._room = layout, cells, stores, 0
        self._running = self._pending = None

    def _move(self, order: array[int], cells: int, members: object, moved: list[DenseRows]) -> None:
        """Move the rows, then rename the cells. May be repeated until it was done.

        Each layer is moved aside and exchanged when it is done, so that it is never half-way;
        `moved` are those that are done. The members are replaced when the cells are renamed.
        """
        self._running = None
        formers = mx.array(order.tolist(), mx.int32)
        for layer, store in enumerate(self._stores):
            if layer == len(moved):
                twin = store.copy()
                twin.move(formers, cells)
                mx.eval(twin.state)
                moved.append(twin)
            self._stores[layer] = moved[layer]
        self._cells, self._room = cells, 0
        if self.layout.members is members:
            self.layout.apply_defragment(order)
        self._pending = None

    def _begin_step(self, step: DeclaredStep, rows: KeysValues | None) -> CellStep:
        layout = self.layout
        end = layout.used_end
        if end > self._room:
            self._make_room(end, grown_rows(self._cells, end, layout.capacity), rows)
        return CellStep(layout, step, len(self._stores), self._array_start)

    def _make_room(self, least: int, most: int, rows: KeysValues | None) -> None:
        """Let there be `most` cells, or as many as there is memory for, from `least` on.

        Raises `MemoryLimitError`.
        """
        kv_dtype, stores = self.config.kv_dtype, self._stores
        form = cell_form(stores, kv_dtype, rows)
        floor = 0 if any(store.rows for store in stores) else self._cells
        cells = affordable_cells(
            self.geometry.layers, stores, form or RowForm.least(kv_dtype), least, most, floor
        )
        room = self._room if form is None else cells
        # One statement.
        self._cells, self._room = cells, room

    def _check_single_answer(self, step: DeclaredStep) -> None:
        """Every step has one: the cells, and a mask over them."""

    def _write(self, running: CellStep, layer: int, keys: mx.array, values: mx.array) -> None:
        store = self._stores[layer]
        rows = self._cells
        if store.keys is None:
            if rows > self._room:
                # The mask was asked for before it was known what the rows are.
                self._make_room(rows, rows, (keys, values))
            _, heads, _, key_dim = keys.shape
            stored = getattr(mx, self.config.kv_dtype or "", None)
            store.allocate(
                (1, heads, rows, key_dim),
                (1, heads, rows, values.shape[3]),
                stored or keys.dtype,
                stored or values.dtype,
            )
        elif store.keys.shape[2] < rows:
            store.grow(rows)
        store.write(running.placement, keys, values)

    def _attend(
        self, running: CellStep, layer: int, queries: mx.array, options: AttendOptions
    ) -> mx.array:
        read = self._read(running, layer)
        return attend_view(queries, self._stores[layer].read((read.run,)), read.mask, options)

    def _single_answer(self, running: CellStep, layer: int) -> KeysValues:
        return self._stores[layer].read((self._read(running, layer).run,)).dense()

    def _mask(self, running: CellStep, layer: int) -> Mask:
        return self._read(running, layer).mask

    def _read(self, running: CellStep, layer: int) -> CellRead:
        """What the layers with this layer's window read: made by the first of them."""
        window = self.geometry.layers[layer].policy.window
        return running.reads.get(window) or running.read(window)


class CellRead(NamedTuple):
    """The cells to read, and which of them each query sees.

    mask: None (all), "causal" (lower-right aligned), or bool [T, length of the run].
    """

    run: Run
    mask: Mask


class CellStep:
    """A placed step, made once and shared by the layers; what is read, once for each window.

    placement: where the rows go, the same in every layer. A query sees the cells of its own
    sequence at positions up to its own, within the window.
    """

    def __init__(
        self, layout: CellLayout, step: DeclaredStep, layers: int, array_start: bool
    ) -> None:
        self._layout = layout
        self.step = step
        self.unwritten = set(range(layers))
        self.reads: dict[int, CellRead] = {}
        self._queries: mx.array | None = None
        runs = runs_of_cells(layout.placed_cells)
        if len(runs) > 1 and len(runs) * ROWS_WORTH_A_RUN > step.tokens:
            self.placement = Placement((), (), mx.array(list(layout.placed_cells), mx.int32))
            return
        starts = [mx.array([start]) if array_start else start for start, _ in runs]
        self.placement = Placement(runs, tuple(starts))

    def read(self, window: int) -> CellRead:
        """What the layers with this window read, 0 for those that see every position."""
        if window not in self.reads:
            self.reads[window] = self._contiguous(window) or self._masked(window)
        return self.reads[window]

    def _contiguous(self, window: int) -> CellRead | None:
        """The view of one sequence whose visible positions lie in consecutive cells, in order.

        Such cells are what a sequence cache holds, so its masks hold for them too.
        """
        step = self.step
        if len(step.starts) > 1:
            return None
        ((sequence, position),) = step.starts.items()
        first = max(0, position - window + 1) if window else 0
        if not self._layout.is_contiguous(sequence, first):
            return None
        rows = position + step.tokens - first
        run = Run(self._layout.members[sequence].cells[first], rows)
        if step.tokens == 1:
            return CellRead(run, None)
        if not window or rows <= window:
            return CellRead(run, "causal")
        return CellRead(run, band(position, step.tokens, first, rows, window))

    def _masked(self, window: int) -> CellRead:
        """What any step reads: a mask from the positions that the cells hold for each query."""
        members, visible = self._layout.members, []
        begin, end = NOT_OWNED, 0
        for sequence, start in self.step.starts.items():
            first = max(0, start - window + 1) if window else 0
            # A copy: an array that lends its buffer cannot be appended to.
            cells = np.array(memoryview(members[sequence].cells)[first:], np.int32)
            begin, end = min(begin, int(cells.min())), max(end, int(cells.max()) + 1)
            visible.append((first, cells))
        table = np.full((len(visible), end - begin), NOT_OWNED, np.int32)
        for row, (first, cells) in enumerate(visible):
            table[row, cells - begin] = np.arange(first, first + len(cells), dtype=np.int32)
        if self._queries is None:
            self._queries = mx.array(self.step.positions, mx.int32)[:, None]
        if len(self.step.spans) == self.step.tokens == len(visible):
            mask = _sees(self._queries, table, window)
        else:
            mask = self._mask_by_blocks(self._queries, table, window)
        return CellRead(Run(begin, end - begin), mask)

    def _mask_by_blocks(self, queries: mx.array, table: NDArray[np.int32], window: int) -> mx.array:
        """bool [T, cells] from the position of each cell for each sequence of the step."""
        row_of = {sequence: row for row, sequence in enumerate(self.step.starts)}
        blocks = []
        for spans in _blocks(self.step.spans):
            first, last = spans[0].first, spans[-1].first + spans[-1].tokens
            held = table[[row_of[span.sequence] for span in spans]]
            blocks.append(_sees(queries[first:last], held, window))
        return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=0)


def _sees(queries: mx.array, table: NDArray[np.int32], window: int) -> mx.array:
    """Which cells each query sees, by the position that a cell holds for the query's sequence."""
    held = mx.array(table)
    return (held <= queries) & (held > queries - window) if window else held <= queries


def _blocks(spans: Sequence[StepSpan]) -> Iterator[Sequence[StepSpan]]:
    """Spans that can be masked at once: neighbors of one token each, or a single long one."""
    first = 0
    for index, span in enumerate(spans):
        if span.tokens > 1:
            if index > first:
                yield spans[first:index]
            yield spans[index : index + 1]
            first = index + 1
    if first < len(spans):
        yield spans[first:]
