"""cache_steps.py runs at tiny sizes, and the figures that are counted, not timed, are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from cache_steps import app
from capacity_steps import capacity_results
from contenders import Shape
from growth_copies import GrowthResult, Joins, growth_results, watched_joins
from host_steps import flat_phases, ring_phases

from tests.support.command_lines import run_app

pytestmark = pytest.mark.slow

TINY = ["--layers", "2", "--heads", "1", "--dim", "8", "--steps", "12"]
SHAPE = Shape(layers=2, heads=1, dim=8, dtype="float32")


def run(*options: str) -> tuple[int, str]:
    return run_app(app, *TINY, *options)


def find(results: list[GrowthResult], way: str, contender: str) -> GrowthResult:
    (found,) = [one for one in results if (one.way, one.contender) == (way, contender)]
    return found


def test_every_part_is_shown_and_written(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, shown = run(
        "--prompt", "6", "--window", "8", "--capacities", "256,512", "--visible", "8",
        "--tokens", "600", "--markdown", "--json", str(file),
    )  # fmt: skip
    assert code == 0, shown
    written = json.loads(file.read_text())
    assert set(written["results"]) == {"flat", "ring", "capacity", "growth"}
    assert written["settings"]["layers"] == 2
    assert shown.startswith(f"**{written['machine']['warning']}**") or written["machine"]["metal"]
    assert written["machine"]["cpu"] in shown
    for title in ("flat", "ring", "with attention over 8-16 rows", "Bytes copied by growth"):
        assert title in shown
    phases = written["results"]["ring"]
    assert [phase["name"] for phase in phases] == ["ring, first 96 steps", "ring, wrapped"]
    assert [phase["first_position"] for phase in phases] == [8, 104]
    assert phases[1]["host_us_per_layer"]["mlx-lm"]["count"] == 12


def test_one_part_alone_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, shown = run("--only", "growth", "--tokens", "300", "--json", str(file))
    assert code == 0, shown
    assert set(json.loads(file.read_text())["results"]) == {"growth"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "no/such/directory/out.json"], "no directory"),
        (["--capacities", "many"], "positive integers"),
        (["--capacities", "0"], "positive integers"),
        (["--only", "speed"], "speed"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_timed(
    options: list[str], message: str
) -> None:
    code, shown = run(*options)
    assert code == 2
    assert message in shown
    assert "Host microseconds" not in shown


def test_the_script_runs_by_itself(benchmarks: Path) -> None:
    script = str(benchmarks / "cache_steps.py")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Examples" in done.stdout


def test_copies_on_the_way_one_by_one_are_those_of_the_two_rules() -> None:
    row = SHAPE.row_bytes * SHAPE.layers
    results = growth_results(SHAPE, tokens=2100, prompt=3000, chunk=2048)
    ours = find(results, "one by one", "mlx_kvcache")
    theirs = find(results, "one by one", "mlx-lm")
    # 512 rows, doubled: 512 -> 1024 -> 2048 -> 4096.
    assert (ours.growths, ours.copied, ours.held) == (3, (512 + 1024 + 2048) * row, 4096 * row)
    # 256 rows more each time: 256 -> 512 -> ... -> 2304.
    assert (theirs.growths, theirs.copied) == (8, 256 * sum(range(1, 9)) * row)
    assert theirs.held == 2304 * row
    assert ours.written == (1024 + 2048 + 4096) * row
    assert theirs.written == 256 * sum(range(2, 10)) * row


def test_copies_follow_the_length_the_prompt_and_a_reservation() -> None:
    row = SHAPE.row_bytes * SHAPE.layers
    longer = growth_results(SHAPE, tokens=1500, prompt=700, chunk=600)
    shorter = growth_results(SHAPE, tokens=1000, prompt=700, chunk=600)
    way = "prompt of 700 in chunks of 600, then one by one"
    # The first chunk allocates 1024 rows at once.
    assert find(longer, way, "mlx_kvcache").copied == 1024 * row
    assert find(shorter, way, "mlx_kvcache").copied == 0
    # 600 rows lie in 768, which hold the whole prompt; then 256 more each time.
    assert find(longer, way, "mlx-lm").copied == (768 + 1024 + 1280) * row
    assert find(shorter, way, "mlx-lm").copied == 768 * row
    assert find(longer, "one by one, length reserved", "mlx_kvcache").copied == 0
    assert find(longer, "one by one, length reserved", "mlx_kvcache").held == 1500 * row
    assert {one.tokens for one in longer} == {1500}


def test_growth_that_was_not_seen_is_an_error_and_not_a_zero() -> None:
    joins = Joins()
    joins.note([mx.zeros((4,)), mx.zeros((2,))])
    joins.check(24)
    with pytest.raises(RuntimeError, match="not seen"):
        joins.check(25)
    assert joins.take() == 16
    with pytest.raises(RuntimeError, match="not seen"):
        joins.check(24)


def test_the_watch_takes_itself_off_again() -> None:
    before = mx.concatenate
    with watched_joins() as joins:
        mx.concatenate([mx.zeros((3,)), mx.zeros((1,))])
        assert mx.concatenate is not before
    assert joins.take() == 12
    assert mx.concatenate is before
    with pytest.raises(ValueError, match="concatenate"), watched_joins():
        mx.concatenate([])
    assert mx.concatenate is before


def test_steps_at_which_buffers_grow_are_set_apart() -> None:
    (phase,) = flat_phases(SHAPE, prompt=500, steps=30)
    # Ours grows at 512 rows, mlx-lm's too: both hold 512 after a prompt of 500.
    assert [len(side) for side in phase.growths] == [1, 1]
    assert [side.count for side in phase.host] == [30, 30]
    (before,) = flat_phases(SHAPE, prompt=400, steps=30)
    assert [len(side) for side in before.growths] == [0, 0]


def test_ring_steps_are_all_past_the_window() -> None:
    first, steady = ring_phases(SHAPE, window=16, steps=10)
    assert first.first == 16
    assert steady.first == first.first + first.ratio.count
    assert steady.ratio.count == 10


def test_capacities_are_what_was_asked_for() -> None:
    results = capacity_results(SHAPE, [256, 512], visible=8, steps=20)
    assert [(one.contender, one.rows) for one in results] == [
        ("mlx_kvcache", 256), ("mlx_kvcache", 512), ("mlx-lm", 256), ("mlx-lm", 512),
    ]  # fmt: skip
    assert [one.ratio.median for one in results if one.rows == 256] == [1.0, 1.0]
    assert all(one.step.count == 20 for one in results)


@pytest.mark.parametrize("rows", [100, 256])
def test_capacities_that_one_of_the_caches_cannot_have_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} does not fit"):
        capacity_results(SHAPE, [rows, 512], visible=150, steps=20)
    code, shown = run("--only", "capacity", "--capacities", f"{rows},512", "--visible", "150")
    assert code == 2
    assert "does not fit" in shown
