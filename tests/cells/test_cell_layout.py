"""CellLayout in integers: owners, holes, the end, ids without a limit, defragmentation, the map."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.errors import (
    CapacityError,
    ConfigError,
    KVCacheError,
    PositionError,
    RewindError,
    StepError,
    UnknownSequenceError,
)
from mlx_kvcache.layout.cells import CellLayout, runs_of_cells
from mlx_kvcache.layout.steps import StepSpan, spans_of_tokens


def place(layout: CellLayout, *spans: tuple[int, int]) -> list[int]:
    layout.declare_step(spans)
    layout.place_step()
    layout.finish_step()
    return list(layout.placed_cells)


def test_integers_need_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys; sys.modules.update(mlx=None, numpy=None); "
        "from mlx_kvcache.layout import CellLayout, BatchedLayout; CellLayout(8).new()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cells_in_order_then_holes_then_the_end() -> None:
    layout = CellLayout(10)
    a, b = layout.new(), layout.new()
    assert place(layout, (a, 3), (b, 2)) == [0, 1, 2, 3, 4]
    layout.rewind(a, 1)
    assert (layout.used, layout.used_end, layout.free) == (3, 5, 7)
    assert place(layout, (b, 3)) == [1, 2, 5]
    assert list(layout.cells(b)) == [3, 4, 1, 2, 5]
    assert not layout.is_contiguous(b)
    assert layout.is_contiguous(b, 4)
    assert not layout.is_contiguous(b, 3)
    assert layout.is_contiguous(a)
    assert [layout.position_of_cell(cell) for cell in range(7)] == [0, 2, 3, 0, 1, 4, -1]


def test_the_end_shrinks_to_the_last_taken_cell() -> None:
    layout = CellLayout(20)
    a, b, c = (layout.new() for _ in range(3))
    place(layout, (a, 3), (b, 3), (c, 3))
    layout.remove(b)
    assert (layout.used, layout.used_end) == (6, 9)
    layout.remove(c)
    assert (layout.used, layout.used_end) == (3, 3)
    # The hole at 3 to 5 was cut off with the end: it is given out once, as the end.
    assert place(layout, (a, 8)) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_a_cell_frees_with_its_last_owner() -> None:
    layout = CellLayout(10)
    a = layout.new()
    place(layout, (a, 4))
    b = layout.fork(a, 3)
    c = layout.fork(b)
    assert [layout.owners(cell) for cell in range(5)] == [(0, 1, 2)] * 3 + [(0,), ()]
    layout.remove(a)
    assert (layout.used, layout.used_end) == (3, 3)
    layout.rewind(b, 1)
    assert [layout.owners(cell) for cell in range(3)] == [(1, 2), (2,), (2,)]
    layout.remove(c)
    assert (layout.used, layout.used_end) == (1, 1)
    assert list(layout.cells(b)) == [0]


def test_a_fork_diverges_and_its_origin_does_not_notice() -> None:
    layout = CellLayout(20)
    a = layout.new()
    place(layout, (a, 4))
    b = layout.fork(a, 2)
    assert place(layout, (b, 2), (a, 1)) == [4, 5, 6]
    assert list(layout.cells(a)) == [0, 1, 2, 3, 6]
    assert list(layout.cells(b)) == [0, 1, 4, 5]
    assert [layout.position(s) for s in (a, b)] == [5, 4]


def test_more_sequences_than_a_machine_word_has_bits() -> None:
    layout = CellLayout(700)
    a = layout.new()
    place(layout, (a, 5))
    forks = [layout.fork(a) for _ in range(300)]
    assert layout.used == 5
    assert layout.owners(0) == tuple(range(301))
    place(layout, *((fork, 1) for fork in forks))
    assert layout.used == 305
    assert layout.owners(4 + 150) == (150,)
    for fork in forks[:-1]:
        layout.remove(fork)
    assert layout.owners(2) == (0, 300)
    layout.remove(forks[-1])
    layout.remove(a)
    assert (layout.used, layout.used_end) == (0, 0)


def test_the_lowest_unused_id_is_given() -> None:
    layout = CellLayout(10)
    assert [layout.new() for _ in range(4)] == [0, 1, 2, 3]
    layout.remove(2)
    layout.remove(0)
    assert [layout.new(), layout.fork(1), layout.new()] == [0, 2, 4]


def test_an_id_that_is_given_again_inherits_nothing() -> None:
    layout = CellLayout(10)
    a, b = layout.new(), layout.new()
    place(layout, (a, 2), (b, 2))
    layout.remove(a)
    assert layout.new() == a
    assert layout.position(a) == 0
    assert place(layout, (a, 3)) == [0, 1, 4]


def test_positions_are_those_of_each_sequence() -> None:
    layout = CellLayout(50)
    a, b = layout.new(), layout.new()
    place(layout, (a, 3), (b, 1))
    step = layout.declare_step([(b, 2), (a, 1), (b, 3)])
    assert step.spans == (StepSpan(b, 0, 2, 1), StepSpan(a, 2, 1, 3), StepSpan(b, 3, 3, 3))
    assert step.positions == (1, 2, 3, 3, 4, 5)
    assert step.token_sequences == (b, b, a, b, b, b)
    assert step.sequences == (b, a)
    assert step.last_tokens == (5, 2)
    assert step.starts == {b: 1, a: 3}
    assert layout.place_step([1, 2, 3, 3, 4, 5]) is step


def test_spans_from_one_id_a_token() -> None:
    assert spans_of_tokens([4, 4, 1, 4, 4, 4]) == [(4, 2), (1, 1), (4, 3)]
    assert spans_of_tokens([]) == []


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_cover_the_cells_in_their_order(cells: list[int]) -> None:
    runs = runs_of_cells(cells)
    assert [cell for run in runs for cell in range(run.start, run.start + run.length)] == cells
    for run, following in pairwise(runs):
        assert following.start != run.start + run.length


def test_a_declaration_is_the_gate() -> None:
    layout = CellLayout(4)
    a, b = layout.new(), layout.new()
    place(layout, (a, 2))
    standing = layout.declare_step([(b, 1)])
    bad: list[tuple[type[KVCacheError], object, object]] = [
        (StepError, [], None),
        (StepError, [(a, 0)], None),
        (StepError, [(a, -1)], None),
        (StepError, [(a, 1.0)], None),
        (StepError, [("a", 1)], None),
        (StepError, [a, b], None),
        (UnknownSequenceError, [(a, 1), (7, 1)], None),
        (CapacityError, [(a, 2), (b, 1)], None),
        (PositionError, [(a, 1)], [1]),
        (PositionError, [(a, 1)], [3]),
        (PositionError, [(a, 1), (a, 1)], [2, 2]),
        (PositionError, [(a, 2)], [2]),
    ]
    for error, spans, positions in bad:
        with pytest.raises(error):
            layout.declare_step(spans, positions)  # type: ignore[arg-type]
        assert layout.now.declared is standing
    assert layout.place_step() is standing
    layout.finish_step()
    assert layout.used == 3


def test_one_declaration_authorises_one_placement() -> None:
    layout = CellLayout(10)
    a = layout.new()
    with pytest.raises(StepError, match="declare_step"):
        layout.place_step()
    step = layout.declare_step([(a, 2)])
    with pytest.raises(PositionError):
        layout.place_step([0, 2])
    assert layout.now.declared is step
    layout.place_step([0, 1])
    for _ in range(3):
        assert layout.place_step() is step
        assert layout.place_step([0, 1]) is step
    with pytest.raises(PositionError, match="continues at 0"):
        layout.place_step([2, 3])
    assert (layout.used, layout.position(a)) == (2, 2)


@pytest.mark.parametrize("verb", ["fork", "remove", "rewind", "defragment"])
def test_a_verb_drops_the_placement_and_is_no_declaration(verb: str) -> None:
    layout = CellLayout(10)
    a, b = layout.new(), layout.new()
    place(layout, (a, 2), (b, 1))
    assert layout.place_step() is layout.now.placed
    if verb == "fork":
        layout.fork(a)
    elif verb == "remove":
        layout.remove(b)
    elif verb == "rewind":
        layout.rewind(a, 1)
    else:
        layout.apply_defragment(layout.plan_defragment())
    with pytest.raises(StepError):
        layout.place_step()
    with pytest.raises(StepError):
        layout.place_step([0, 1, 0])


def test_a_declaration_outlives_verbs_that_do_not_concern_it() -> None:
    layout = CellLayout(10)
    a, b = layout.new(), layout.new()
    place(layout, (a, 2), (b, 2))
    step = layout.declare_step([(a, 1)])
    layout.fork(a)
    layout.remove(b)
    assert layout.place_step() is step
    assert list(layout.placed_cells) == [2]

    layout.finish_step()
    layout.declare_step([(a, 1)])
    layout.rewind(a, 1)
    with pytest.raises(StepError, match="stands at 1"):
        layout.place_step()
    layout.remove(a)
    with pytest.raises(StepError, match="is gone"):
        layout.place_step()


def test_an_unfinished_step_blocks_its_sequences_only() -> None:
    layout = CellLayout(10)
    a, b = layout.new(), layout.new()
    place(layout, (a, 2))
    layout.declare_step([(a, 2)])
    layout.place_step()
    assert layout.unfinished == {a: 2}
    for call in (
        lambda: layout.declare_step([(a, 1)]),
        lambda: layout.declare_step([(b, 1), (a, 1)]),
        lambda: layout.fork(a),
        lambda: layout.rewind(a, 3),
        layout.plan_defragment,
    ):
        with pytest.raises(StepError, match=r"not\s+finished"):
            call()
    place(layout, (b, 1))
    assert layout.fork(a, 2) == 2
    layout.rewind(a, 2)
    assert not layout.unfinished
    assert place(layout, (a, 1)) == [2]


def test_verbs_name_what_is_wrong() -> None:
    layout = CellLayout(10, max_context=3)
    a = layout.new()
    place(layout, (a, 2))
    with pytest.raises(UnknownSequenceError, match=r"no sequence 5; .* Live: 0") as refusal:
        layout.position(5)
    assert str(refusal.value).startswith("there is no sequence 5")
    with pytest.raises(KeyError):
        layout.remove(-1)
    with pytest.raises(RewindError, match="holds 2 positions"):
        layout.rewind(a, 3)
    with pytest.raises(RewindError, match="integer"):
        layout.rewind(a, 1.0)  # type: ignore[arg-type]
    with pytest.raises(RewindError, match="up to -1"):
        layout.fork(a, -1)
    with pytest.raises(CapacityError, match="max_context"):
        layout.declare_step([(a, 1), (a, 1)])
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="max_context"):
            CellLayout(10, max_context=bad)  # type: ignore[arg-type]


def test_a_fork_of_nothing_is_a_new_sequence() -> None:
    layout = CellLayout(10)
    a = layout.new()
    b, c = layout.fork(a), layout.fork(a, 0)
    assert place(layout, (c, 1), (b, 1), (a, 1)) == [0, 1, 2]
    assert [layout.owners(cell) for cell in range(3)] == [(c,), (b,), (a,)]


def test_defragmentation_lays_out_sequence_after_sequence() -> None:
    layout = CellLayout(30)
    a, b, c = (layout.new() for _ in range(3))
    for _ in range(3):
        place(layout, (a, 1), (b, 1), (c, 1))
    d = layout.fork(c, 2)
    place(layout, (d, 1))
    layout.remove(b)
    assert layout.cell_map().splitlines()[1:] == ["0 0.+0.+0.23"]
    order = layout.plan_defragment()
    assert list(order) == [0, 3, 6, 2, 5, 8, 9]
    assert layout.cell_map().splitlines()[1:] == ["0 0.+0.+0.23"]
    layout.apply_defragment(order)
    assert layout.cell_map().splitlines()[1:] == ["0 000++23"]
    assert (layout.used, layout.used_end) == (7, 7)
    assert list(layout.cells(d)) == [3, 4, 6]
    assert layout.is_contiguous(c)
    assert not layout.is_contiguous(d)
    assert list(layout.plan_defragment()) == list(range(7))
    assert place(layout, (a, 2)) == [7, 8]


def test_the_map_explains_itself() -> None:
    layout = CellLayout(200)
    forks = [layout.new() for _ in range(70)]
    place(layout, *((s, 1) for s in forks))
    layout.remove(11)
    head, first, second = layout.cell_map(width=60).splitlines()
    assert head.startswith("69 of 200 cells used, the last one below 70; . free")
    assert first == " 0 0123456789a.cdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
    assert second == "60 YZ********"
    assert CellLayout(4).cell_map().count("\n") == 0
