"""Long schedules over MLXCellCache, and the bugs that they notice."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache import cells as cell_cache
from mlx_kvcache.cache.cells import CellStep, MLXCellCache
from mlx_kvcache.layout import cells
from mlx_kvcache.layout.cells import CellLayout
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.store import rows as store
from mlx_kvcache.store.rows import DenseRows
from tests.support.many_sequences_driver import Driver
from tests.support.many_sequences_schedule import run_schedule

WINDOWS = (0, 3, 0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["array", "integer"])
@pytest.mark.parametrize("seed", range(3))
def test_long_schedules(form: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_KVCACHE_START", form)
    driver = Driver(MLXCellCache, WINDOWS, capacity=60, seed=seed)
    met = run_schedule(driver, 150, seed)
    for what in ("step", "step over several", "fork", "rewind", "remove", "defragment"):
        assert met[what] > 0, f"{what} was never met"
    assert driver.seen > 1000


def test_lowest_free_cells_are_taken() -> None:
    """Against a table that is searched from its first cell on."""
    driver = Driver(MLXCellCache, (0,), capacity=40, shared=())
    layout = driver.cache.layout
    random = np.random.default_rng(5)
    refilled = 0
    for _ in range(12):
        while len(driver.truth) < 4:
            driver.new()
        for _ in range(6):
            spans = [(int(s), int(random.integers(1, 3))) for s in driver.truth]
            count = sum(n for _, n in spans)
            free = [c for c in range(40) if not layout.owners(c)]
            if count > len(free):
                break
            end = layout.used_end
            driver.step(spans)
            assert list(layout.placed_cells) == free[:count]
            refilled += layout.placed_cells[0] < end
        driver.remove(int(random.choice(sorted(driver.truth))))
        sequence = int(random.choice(sorted(driver.truth)))
        driver.rewind(sequence, len(driver.truth[sequence]) // 2)
    assert refilled > 10


def bug(name: str) -> Callable[[Any], Any]:
    def keep(plant: Any) -> Any:
        BUGS[name] = plant
        return plant

    return keep


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


@bug("a fork shares one position more")
def _(patch: pytest.MonkeyPatch) -> None:
    original = cells._Member.prefix
    patch.setattr(cells._Member, "prefix", lambda self, length: original(self, length + 1))


@bug("a fork does not own its cells")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cells._WithOwner, "__missing__", lambda _self, owners: owners)


@bug("a cell frees with its first owner")
def _(patch: pytest.MonkeyPatch) -> None:
    original = CellLayout._disown

    def disown(self: CellLayout, sequence: int, held: Any) -> None:
        held = list(held)
        for cell in held:
            self._owners[cell] = 1 << sequence
        original(self, sequence, held)

    patch.setattr(CellLayout, "_disown", disown)


@bug("a removed sequence keeps its cells")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CellLayout, "_disown", lambda *_: None)


@bug("the end does not shrink")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        CellLayout, "used_end", property(lambda self: max(len(self._owners), 1 + len(self._holes)))
    )


@bug("holes are not filled")
def _(patch: pytest.MonkeyPatch) -> None:
    original = CellLayout._take

    def take(self: CellLayout, count: int) -> Any:
        self._holes.clear()
        return original(self, count)

    patch.setattr(CellLayout, "_take", take)


@bug("holes that were cut off are given out")
def _(patch: pytest.MonkeyPatch) -> None:
    def take(self: CellLayout, count: int) -> Any:
        taken = array(
            "i", [heapq.heappop(self._holes) for _ in range(min(count, len(self._holes)))]
        )
        end = max([self.used_end, *(c + 1 for c in taken)])
        more = max(0, count - len(taken))
        taken.extend(range(end, end + more))
        grown = end + more - len(self._owners)
        self._owners.extend([0] * grown)
        self._positions.extend([-1] * grown)
        self._used += count
        return taken

    patch.setattr(CellLayout, "_take", take)


@bug("the mask forgets owners")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cell_cache, "NOT_OWNED", 0)


@bug("the window is one too wide")
def _(patch: pytest.MonkeyPatch) -> None:
    original = CellStep.read
    patch.setattr(CellStep, "read", lambda self, w: original(self, w and w + 1))


@bug("every sequence counts as contiguous")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CellLayout, "is_contiguous", lambda *_: True)


@bug("the first break is enough to look at")
def _(patch: pytest.MonkeyPatch) -> None:
    def is_contiguous(self: CellLayout, sequence: int, first: int = 0) -> bool:
        breaks = self.members[sequence].breaks
        return not breaks or breaks[0] <= first

    patch.setattr(CellLayout, "is_contiguous", is_contiguous)


@bug("rows of a table are taken in the order of the sequences")
def _(patch: pytest.MonkeyPatch) -> None:
    original = cell_cache._sees
    patch.setattr(cell_cache, "_sees", lambda q, table, w: original(q, table[::-1].copy(), w))


@bug("scattered rows go one cell astray")
def _(patch: pytest.MonkeyPatch) -> None:
    original = store.cell_scatter
    patch.setattr(
        store,
        "cell_scatter",
        lambda pool, rows, cells, **choices: original(pool, rows, cells[::-1], **choices),
    )


@bug("values are not scattered")
def _(patch: pytest.MonkeyPatch) -> None:
    original = DenseRows.write

    def write(self: DenseRows, placement: Any, keys: mx.array, values: mx.array) -> None:
        original(self, placement, keys, values if placement.cells is None else values * 0)

    patch.setattr(DenseRows, "write", write)


@bug("runs are written backwards")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cell_cache, "ROWS_WORTH_A_RUN", 0)
    original = cells.runs_of_cells
    patch.setattr(cell_cache, "runs_of_cells", lambda c: original(c)[::-1])


@bug("the read ends one cell early")
def _(patch: pytest.MonkeyPatch) -> None:
    original = CellStep._masked

    def masked(self: CellStep, window: int) -> Any:
        view = original(self, window)
        run = Run(view.run.start, view.run.length - 1)
        return view._replace(run=run, mask=view.mask[:, :-1])

    patch.setattr(CellStep, "_masked", masked)


@bug("defragmentation moves no bytes")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DenseRows, "move", lambda *_: None)


@bug("defragmentation keeps the old positions")
def _(patch: pytest.MonkeyPatch) -> None:
    original = CellLayout.apply_defragment

    def apply(self: CellLayout, order: Any) -> None:
        held = self._positions[: len(order)]
        original(self, order)
        self._positions = held

    patch.setattr(CellLayout, "apply_defragment", apply)


@bug("a rewind leaves its breaks behind")
def _(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Any, position: int) -> Any:
        dropped = self.cells[position:]
        del self.cells[position:]
        self.breaks.clear()
        return dropped

    patch.setattr(cells._Member, "cut", cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError, KeyError)):
        run_all()


def run_all() -> None:
    for seed in range(3):
        run_schedule(Driver(MLXCellCache, WINDOWS, capacity=60, seed=seed), 150, seed)


@pytest.mark.slow
def test_the_schedules_that_notice_bugs_pass_without_one() -> None:
    run_all()
