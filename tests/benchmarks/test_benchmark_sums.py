"""The arithmetic that the benchmarks share: spreads, paired ratios, turns, reports."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from common import Machine, Spread, alternate, paired, turns
from report import Report, markdown_table


def test_a_spread_is_median_quartiles_and_extremes() -> None:
    spread = Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert spread == Spread(5, 3.0, 2.0, 4.0, 1.0, 5.0)
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 30.0]) != spread
    assert spread.scaled(10) == Spread(5, 30.0, 20.0, 40.0, 10.0, 50.0)
    assert spread.quartiles(".1f") == "3.0 [2.0, 4.0]"
    assert spread.extremes(".1f") == "3.0 (1.0-5.0)"


def test_one_sample_is_its_own_spread_and_none_is_refused() -> None:
    assert Spread.of([7.0]) == Spread(1, 7.0, 7.0, 7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="nothing"):
        Spread.of([])


def test_a_ratio_is_taken_pair_by_pair() -> None:
    # The machine slowed down tenfold for the middle pair: the ratio does not see it.
    assert paired([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]).as_dict()["maximum"] == 0.5
    assert paired([1.0, 10.0, 1.0], [2.0, 2.0, 2.0]).maximum == 5.0
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 2.0])


def test_turns_alternate_who_goes_first() -> None:
    assert list(turns(3)) == [(0, 1), (1, 0), (0, 1)]
    shuffled = list(turns(30, 3))
    assert {tuple(sorted(order)) for order in shuffled} == {(0, 1, 2)}
    assert len(set(shuffled)) == 6
    assert shuffled == list(turns(30, 3))


def test_alternate_runs_everyone_once_a_round_with_collection_off() -> None:
    called: list[int] = []
    collecting: list[bool] = []

    def contender(index: int) -> tuple[float, float]:
        called.append(index)
        collecting.append(gc.isenabled())
        return float(index), float(len(called))

    times = alternate(2, [lambda: contender(0), lambda: contender(1)])
    assert called == [0, 1, 1, 0]
    assert times == [[(0.0, 1.0), (0.0, 4.0)], [(1.0, 2.0), (1.0, 3.0)]]
    assert collecting == [False] * 4
    assert gc.isenabled()


def test_figures_are_called_cpu_figures_exactly_where_there_is_no_metal() -> None:
    here = Machine.here()
    assert (here.warning == "CPU figures; not Metal") == (not here.metal)
    assert here.as_dict()["warning"] == here.warning
    for fact in (here.cpu, here.device, here.mlx, here.mlx_lm, here.mlx_kvcache, here.python):
        assert fact
        assert fact in here.line
    on_metal = Machine(**{**vars(here), "metal": True})
    assert on_metal.warning == ""


def test_a_markdown_report_starts_with_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("some", Machine.here(), {"steps": 3}, markdown=True)
    report.header()
    report.table("Title", ["", "a [b]"], [["row", "1 [0, 2]"]])
    report.results["x"] = [1, 2]
    report.write(tmp_path / "out.json")
    shown = capsys.readouterr().out
    assert report.machine.warning in shown.splitlines()[0]
    assert report.machine.line in shown
    assert markdown_table("Title", ["", "a [b]"], [["row", "1 [0, 2]"]]) in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["benchmark"] == "some"
    assert written["machine"] == report.machine.as_dict()
    assert written["settings"] == {"steps": 3}
    assert written["results"] == {"x": [1, 2]}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_report_for_the_terminal_keeps_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("some", Machine.here(), {"steps": 3})
    report.table("Title", ["", "a [b]"], [["row", "1 [0, 2]"]])
    shown = capsys.readouterr().out
    assert "a [b]" in shown
    assert "1 [0, 2]" in shown
