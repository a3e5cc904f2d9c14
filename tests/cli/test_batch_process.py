"""`batch` as a process that is stopped, killed, or has nobody to write to, and what is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mlx_kvcache.commands.batch_signals import stop_signals
from tests.support.processes import finish, start
from tests.support.tiny_models_on_disk import words

TIMES = ("queue_seconds", "first_token_seconds", "total_seconds")
PROMPTS = [words(*(3 + (7 * line + place) % 90 for place in range(1 + line % 9)))
           for line in range(60)]  # fmt: skip
#: So many lines that no run in a test comes to their end.
ENDLESS = "\n".join(json.dumps({"prompt": text, "max_tokens": 40}) for text in PROMPTS * 30)


def without_times(text):
    """The results as bytes, in the order of their lines, but for how long they took."""
    results = sorted(map(json.loads, text.splitlines()), key=lambda each: each["line"])
    return [
        json.dumps({name: each[name] for name in each if name not in TIMES}).encode()
        for each in results
    ]


def wait_for_lines(path, count, process):
    """Wait until a file has so many lines, while the process runs."""
    end = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no results came"
        time.sleep(0.001)


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(run, llama, tmp_path):
    """Killed twice at random moments: the results are those of a run that nothing disturbs."""
    prompts, output = tmp_path / "prompts", tmp_path / "results"
    prompts.write_text("\n".join(PROMPTS))
    arguments = ("batch", prompts, "-m", llama, "--max-tokens", 30, "--sessions", 3)
    whole = run(*arguments)
    assert whole.exit_code == 0
    into = (*arguments, "--output", output, "--resume")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    before = b""
    for kills in (1, 2):
        process = start(*into, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for_lines(output, before.count(b"\n") + choose.randint(1, 12), process)
        if kills == 1:
            other = run(*into)
            assert other.exit_code == 2
            assert "another run is writing to --output" in other.stderr
        time.sleep(choose.uniform(0, 0.05))
        process.kill()
        finish(process)
        assert process.returncode == -signal.SIGKILL
        written = output.read_bytes()
        assert written.startswith(before)
        before = written[: written.rfind(b"\n") + 1]
        assert kills <= before.count(b"\n") < len(PROMPTS)
    result = run(*into)
    assert result.exit_code == 0, result.stderr
    assert output.read_bytes().startswith(before)
    assert without_times(output.read_text()) == without_times(whole.stdout)
    assert len(without_times(whole.stdout)) == len(PROMPTS)
    assert {path.name for path in tmp_path.iterdir()} == {"prompts", "results"}


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_whole_lines(llama, tmp_path):
    prompts, output = tmp_path / "prompts", tmp_path / "results"
    prompts.write_text(ENDLESS)
    arguments = ("batch", prompts, "-m", llama, "--output", output)
    process = start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_lines(output, 3, process)
    process.send_signal(signal.SIGINT)
    shown, errors = finish(process)
    assert (process.returncode, shown) == (130, "")
    lines = errors.splitlines()
    assert lines[-2:] == [
        f"output  {output} has what is finished; --resume goes on from there",
        "interrupted",
    ]
    text = output.read_text()
    assert text.endswith("\n")
    results = [json.loads(line) for line in text.splitlines()]
    assert lines[0].startswith(f"batch   {len(results)} finished, 0 failed, ")
    assert 3 <= len(results) < 1800
    assert {each["generated_tokens"] for each in results} == {40}


@pytest.mark.slow
def test_sigterm_writes_what_waits_for_its_turn(llama, tmp_path):
    """Those behind the second line are answered before the first, and wait for the second."""
    counts = (6, 500, 3, 4)
    prompts = tmp_path / "prompts"
    lines = [{"prompt": "w5", "max_tokens": count} for count in counts]
    prompts.write_text("\n".join(map(json.dumps, [*lines, *[lines[1]] * 400])))
    process = start(
        "batch", prompts, "-m", llama, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest, errors = finish(process)
    assert process.returncode == 143, errors
    results = [json.loads(line) for line in (first + rest).splitlines()]
    assert [(each["line"], each["generated_tokens"]) for each in results[:3]] == [
        (1, 6), (3, 3), (4, 4)
    ]  # fmt: skip
    lines = errors.splitlines()
    assert lines[0].startswith(f"batch   {len(results)} finished, ")
    assert lines[-1] == "terminated"


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(llama, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text(ENDLESS)
    read, write = os.pipe()
    process = start("batch", prompts, "-m", llama, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert os.read(read, 1) == b"{"
    os.close(read)
    _, errors = finish(process)
    assert (process.returncode, errors) == (141, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is a device of Linux")
def test_a_full_disk_behind_standard_output(llama, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text("w5\nw6\n")
    with open("/dev/full", "w") as full:
        process = start(
            "batch", prompts, "-m", llama, "--max-tokens", 2, stdout=full, stderr=subprocess.PIPE
        )
        _, errors = finish(process)
    assert (process.returncode, errors) == (1, "error: [Errno 28] No space left on device\n")


def test_the_first_signal_is_noted_and_the_second_acts():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = list(map(signal.getsignal, numbers))
    with stop_signals() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    for number in numbers:
        with stop_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number
        assert list(map(signal.getsignal, numbers)) == handlers


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
