"""MLXCellCache: many sequences over one store of cells, forks of which copy nothing."""

from __future__ import annotations

import mlx.core as mx

from mlx_kvcache.cache.cell_view import CellView, CellViews
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.cache.shared import AttendOptions, MLXSharedCache, attend_rows
from mlx_kvcache.errors import CapacityError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.layout.cells import CellLayout, runs_of_cells
from mlx_kvcache.layout.runs import Run, grown_rows
from mlx_kvcache.layout.steps import DeclaredStep
from mlx_kvcache.store.cell_rows import CellPool
from mlx_kvcache.store.write import prefers_array_start

KeysValues = tuple[mx.array, mx.array]

#: A run is written at once for about what scattering this many single rows costs (measured).
ROWS_WORTH_A_RUN = 8
_DTYPE_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


class MLXCellCache(MLXSharedCache[CellLayout, KeysValues]):
    """The KV cache of many sequences that may share what they have in common.

    Every layer keeps one pool over the cells, which grows by lazy capacity doubling; a token
    takes the lowest free cell, the same in every layer. A fork only adds an owner to cells. All
    queries of a step are attended at once, over the cells that its sequences may see, with a
    mask made once a step for each distinct window. A window hides cells and frees none, so any
    position can be rewound to.

    `config.capacity` counts cells; `max_context` limits a single sequence. Raises
    `GeometryError` or `ConfigError` when the arguments do not fit together.
    """

    shares_rows = True

    def __init__(
        self,
        geometry: CacheGeometry,
        config: CacheConfig | None = None,
    ) -> None:
        super().__init__(geometry, config)
        config = self.config
        self._pools = tuple(CellPool() for _ in geometry.layers)
        self._storage_dtype = None if config.kv_dtype is None else getattr(mx, config.kv_dtype)
        itemsize = _DTYPE_SIZES.get(config.kv_dtype or "", 2)
        elements = sum(layer.elements_per_position for layer in geometry.layers)
        self._array_start = prefers_array_start(elements * itemsize)
        self._cells = min(config.initial_capacity, config.capacity)
        self._views: CellViews | None = None
        self._writes: tuple[Run, ...] = ()
        self._starts: tuple[int | mx.array, ...] = ()
        self._scattered: mx.array | None = None

    @property
    def used_end(self) -> int:
        """The end of the taken cells."""
        return self.layout.used_end

    @property
    def state(self) -> list[mx.array]:
        arrays = [array for pool in self._pools for array in (pool.keys, pool.values)]
        return [array for array in arrays if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the cells that have an owner."""
        return sum(pool.nbytes // pool.rows * self.used for pool in self._pools if pool.rows)

    def pool(self, layer: int) -> CellPool:
        """The rows of one layer, by cell. Raises `LayerIndexError`."""
        self._check_layer(layer)
        return self._pools[layer]

    def new(self) -> int:
        return self.layout.new()

    def fork(self, sequence: int, up_to: int | None = None) -> int:
        """Begin a sequence that shares the rows of another up to a position; copies nothing.

        Raises `UnknownSequenceError`, `RewindError` for an `up_to` that is not held, or
        `StepError` for rows of an unfinished step.
        """
        identity = self.layout.fork(sequence, up_to)
        self._end_step()
        return identity

    def remove(self, sequence: int) -> None:
        self.layout.remove(sequence)
        self._end_step()

    def rewind(self, sequence: int, position: int) -> None:
        """Forget the positions of a sequence from `position` on; any held position will do.

        Raises `UnknownSequenceError`, `RewindError`, or `StepError` for a position within an
        unfinished step.
        """
        self.layout.rewind(sequence, position)
        self._end_step()

    def reserve(self, cells: int) -> None:
        """Grow once, now, so that `cells` cells need no further growth.

        Raises `CapacityError`, and changes nothing, when there are not that many.
        """
        if cells > self.capacity:
            raise CapacityError(
                f"cannot reserve {cells} cells: the capacity is {self.capacity}; "
                "make the cache with a larger capacity"
            )
        self._cells = max(self._cells, cells)
        for pool in self._pools:
            pool.grow(self._cells)

    def defragment(self) -> int:
        """Move the rows together, sequence after sequence, and give spare memory back.

        Answers how many cells were renamed. Sequences, positions and bytes stay what they are.
        Copies each pool once, layer by layer. Raises `StepError` while a step is unfinished.
        """
        order = self.layout.plan_defragment()
        moved = sum(cell != former for cell, former in enumerate(order))
        cells = grown_rows(
            min(self.config.initial_capacity, self.capacity), len(order), self.capacity
        )
        if moved or cells < self._cells:
            formers = mx.array(order.tolist(), mx.int32)
            for pool in self._pools:
                if len(order):
                    pool.gather(formers, cells)
                    mx.eval(pool.keys, pool.values)
                else:
                    pool.drop()
            self._cells = cells
        self.layout.apply_defragment(order)
        self._end_step()
        return moved

    def cell_map(self, width: int = 64) -> str:
        """A drawing of the cells for people: who owns which, where the holes are."""
        return self.layout.cell_map(width)

    def _make_layout(self) -> CellLayout:
        return CellLayout(self.config.capacity, self.config.max_context)

    def _begin_step(self, step: DeclaredStep) -> None:
        layout = self.layout
        self._cells = grown_rows(self._cells, layout.used_end, layout.capacity)
        self._views = CellViews(layout, step)
        runs = runs_of_cells(layout.placed_cells)
        if len(runs) > 1 and len(runs) * ROWS_WORTH_A_RUN > step.tokens:
            self._scattered = mx.array(list(layout.placed_cells), mx.int32)
            return
        self._scattered = None
        self._writes = runs
        if self._array_start:
            self._starts = tuple(mx.array([run.start]) for run in runs)
        else:
            self._starts = tuple(run.start for run in runs)

    def _end_step(self) -> None:
        self._views = None
        self._scattered = None

    def _check_single_answer(self, step: DeclaredStep) -> None:
        """Every step has one: the cells, and a mask over them."""

    def _write(self, layer: int, keys: mx.array, values: mx.array) -> KeysValues:
        pool = self._pools[layer]
        if not pool.rows:
            _, heads, _, key_dim = keys.shape
            pool.allocate(
                (1, heads, self._cells, key_dim),
                (1, heads, self._cells, values.shape[3]),
                self._storage_dtype or keys.dtype,
                self._storage_dtype or values.dtype,
            )
        pool.grow(self._cells)
        if self._scattered is not None:
            pool.scatter(self._scattered, keys, values)
        else:
            pool.place(self._writes, self._starts, keys, values)
        return self._rows(layer, (keys.dtype, values.dtype))

    def _rows(self, layer: int, dtypes: tuple[mx.Dtype, mx.Dtype]) -> KeysValues:
        keys, values = self._pools[layer].read((self._view(layer).run,))
        return keys.astype(dtypes[0]), values.astype(dtypes[1])

    def _attend(
        self, layer: int, rows: KeysValues, queries: mx.array, options: AttendOptions
    ) -> mx.array:
        return attend_rows(queries, *rows, self._mask(layer), options)

    def _single(self, rows: KeysValues) -> KeysValues:
        return rows

    def _mask(self, layer: int) -> Mask:
        return self._view(layer).mask

    def _view(self, layer: int) -> CellView:
        assert self._views is not None, "a step is placed before a layer is written or asked"
        return self._views.view(self.geometry.layers[layer].policy.window)
