"""What the queries of a step may see of the cells: which cells to read, and the mask over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_kvcache.cache.masks import Mask, band
from mlx_kvcache.layout.cells import CellLayout
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.layout.steps import DeclaredStep, StepSpan

#: The position of a cell for a sequence that does not own it: after every query.
NOT_OWNED = 2**31 - 1


class CellView(NamedTuple):
    """The cells to read, and which of them each query sees.

    mask: None (all), "causal" (lower-right aligned), or bool [T, length of the run].
    """

    run: Run
    mask: Mask


class CellViews:
    """The views of one placed step: made once for each distinct window, shared by the layers.

    A query sees the cells of its own sequence at positions up to its own, within the window.
    """

    def __init__(self, layout: CellLayout, step: DeclaredStep) -> None:
        self._layout = layout
        self._step = step
        self._views: dict[int, CellView] = {}
        self._queries: mx.array | None = None

    def view(self, window: int) -> CellView:
        """The view of the layers with this window, 0 for those that see every position."""
        found = self._views.get(window)
        if found is None:
            found = self._views[window] = self._contiguous(window) or self._masked(window)
        return found

    def _contiguous(self, window: int) -> CellView | None:
        """The view of one sequence whose visible positions lie in consecutive cells, in order.

        Such cells are what a sequence cache holds, so its masks hold for them too.
        """
        step = self._step
        if len(step.starts) > 1:
            return None
        ((sequence, position),) = step.starts.items()
        first = _first_visible(position, window)
        if not self._layout.is_contiguous(sequence, first):
            return None
        rows = position + step.tokens - first
        run = Run(self._layout.cells(sequence)[first], rows)
        if step.tokens == 1:
            return CellView(run, None)
        if not window or rows <= window:
            return CellView(run, "causal")
        return CellView(run, band(position, step.tokens, first, rows, window))

    def _masked(self, window: int) -> CellView:
        """The view of any step: a mask from the positions that the cells hold for each query."""
        starts = self._step.starts
        visible = {
            sequence: _cells_from(self._layout, sequence, _first_visible(start, window))
            for sequence, start in starts.items()
        }
        begin = min(int(cells.min()) for cells in visible.values())
        end = max(int(cells.max()) for cells in visible.values()) + 1
        table = np.full((len(starts), end - begin), NOT_OWNED, np.int32)
        for row, (sequence, cells) in enumerate(visible.items()):
            first = _first_visible(starts[sequence], window)
            table[row, cells - begin] = np.arange(first, first + len(cells), dtype=np.int32)
        return CellView(Run(begin, end - begin), self._mask(table, window))

    def _mask(self, table: NDArray[np.int32], window: int) -> mx.array:
        """bool [T, cells] from the position of each cell for each sequence of the step."""
        if self._queries is None:
            self._queries = mx.array(self._step.positions, mx.int32)[:, None]
        row_of = {sequence: row for row, sequence in enumerate(self._step.starts)}
        blocks = []
        for spans in _blocks(self._step.spans):
            first = spans[0].first
            tokens = sum(span.tokens for span in spans)
            rows = [row_of[span.sequence] for span in spans]
            in_order = rows == list(range(len(table)))
            held = mx.array(table if in_order else table[rows])
            queries = self._queries[first : first + tokens]
            blocks.append(
                (held <= queries) & (held > queries - window) if window else held <= queries
            )
        return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=0)


def _first_visible(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def _cells_from(layout: CellLayout, sequence: int, first: int) -> NDArray[np.int32]:
    # A copy: an array that lends its buffer cannot be appended to.
    return np.array(memoryview(layout.cells(sequence))[first:], np.int32)


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
