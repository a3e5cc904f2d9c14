"""sessions.py runs on a tiny model, and what it compares is the same work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session_runs import Rows, make_work, our_engine, our_fork, ours, their_fork, theirs
from sessions import app

from mlx_kvcache.models import load
from tests.support.command_lines import run_app
from tests.support.tiny_models_on_disk import write_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sessions"))


@pytest.mark.parametrize("prefix", [0, 20])
def test_all_three_give_the_same_tokens(directory: Path, prefix: int) -> None:
    model, tokenizer = load(str(directory))
    work = make_work(tokenizer, 5, prompt=9, tokens=12, prefix=prefix, step=64)
    assert len({len(prompt) for prompt in work.prompts}) > 1
    runs = [ours(our_engine(model, kind), work) for kind in ("cell", "batched")]
    runs.append(theirs(model, work))
    assert runs[0].answers == runs[1].answers == runs[2].answers
    assert [len(answer) for answer in runs[0].answers] == [12] * 5
    assert all(run.step > 0 and run.whole > 0 for run in runs)
    assert all(run.peak > 0 for run in runs)
    other = make_work(tokenizer, 6, prompt=9, tokens=12, prefix=prefix, step=64)
    assert ours(our_engine(model, "cell"), other).answers[:5] != runs[0].answers


def test_a_fork_of_cells_takes_no_memory() -> None:
    rows = Rows(layers=4, heads=2, dim=16)
    # What the step before has left over may go at last.
    assert our_fork(rows, "cell", 1024).taken <= 0
    # Keys and values in float16, of two sequences that no longer share.
    held = 4 * 2 * 2 * 16 * 1024 * 2
    assert our_fork(rows, "cell", 1024).written < held // 8
    assert our_fork(rows, "batched", 1024).written >= held
    assert their_fork(rows, 1024).written >= held


def test_the_script_writes_what_it_shows(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "sessions.json"
    code, shown = run_app(app, "--model", str(directory), "--quick", "--json", str(file))
    assert code == 0, shown
    content: dict[str, Any] = json.loads(file.read_text())
    assert set(content["results"]) == {"nothing in common", "16 common tokens", "forks"}
    for result in content["results"]["nothing in common"]:
        for name in ("cell", "batched", "BatchGenerator"):
            assert result[name]["decode_tokens_per_second"][0] > 0
            assert result[name]["same_tokens"] == [True]
    for name in ("cell", "batched", "BatchGenerator", "copy.deepcopy"):
        assert name in shown


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    code, shown = run_app(app, "--batches", "1,x")
    assert code == 2
    assert "--batches takes integers" in shown
    code, shown = run_app(app, "--json", str(tmp_path / "none" / "x.json"))
    assert code == 2
    assert "no directory" in shown
