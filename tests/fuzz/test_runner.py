"""The runner: it tells what crashed, goes on, sums up, and fails where nothing was shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.fuzz import __main__ as runner
from tests.fuzz.kinds import NAMES, kind_named, kind_of
from tests.fuzz.pool import Pool, Totals

pytestmark = pytest.mark.slow


def test_a_worker_that_dies_is_told_with_its_seed_and_replaced() -> None:
    pool = Pool(500, 90, ["layout"], workers=1)
    deadline = time.monotonic() + 60
    while not pool.processes and time.monotonic() < deadline:
        time.sleep(0.05)
    (process,) = pool.processes
    while pool.newest is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    while pool.wait(1.0):
        assert time.monotonic() < deadline + 60
    (failure,) = pool.totals.failures
    assert failure.what == "crashed: signal 9"
    assert 500 <= failure.seed < 590
    # Those before it in its batch were not counted: what they met died with it.
    assert pool.totals.done == 90
    assert 0 < pool.totals.met["layout"]["histories"] < 90


def test_a_run_shows_its_seeds_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--histories", "60", "--seed", "70", "--only", "layout", "--workers", "1"]
    assert runner.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "60 histories of layout, seeds 70 to 129" in shown
    assert "no difference, no leak, no crash" in shown
    assert "refused rewind" in shown
    assert runner.main(["--only", "nonsense"]) == 2


def test_one_history_is_told_verb_by_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--seed", "3", "--only", "cells", "--skip", "0,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("windows ")
    assert lines[-1] == "no difference"
    numbers = [int(line.split(":")[0]) for line in lines[1:-1]]
    assert numbers == [1, *range(3, numbers[-1] + 1)]


def test_a_run_that_met_too_little_fails(capsys: pytest.CaptureFixture[str]) -> None:
    met = Counter(
        dict.fromkeys(kind_named("layout").must_meet, 5), histories=runner.ENOUGH, verbs=9
    )
    totals = Totals(done=runner.ENOUGH, met={"layout": met})
    assert not runner._sum_up(totals, 1.0, "")
    del met["rewind past a wrap"]
    assert runner._sum_up(totals, 1.0, "")
    assert "NEVER MET layout: rewind past a wrap" in capsys.readouterr().out
    assert runner._sum_up(Totals(), 1.0, "")
    assert "nothing was run" in capsys.readouterr().out


def test_every_kind_has_its_share() -> None:
    drawn = Counter(kind_of(seed, list(NAMES)) for seed in range(2000))
    assert set(drawn) == set(NAMES)
    assert drawn["sequence"] > drawn["engine"] > drawn["chat"] > 0


def test_ctrl_c_ends_with_the_counts() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--only", "layout", "--workers", "1"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert "ended since interrupted" in shown
    assert "no difference, no leak, no crash" in shown or "nothing was run" in shown
    assert "Traceback" not in errors
