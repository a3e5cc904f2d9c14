"""The installed command as a process of its own: signals, pipes, a terminal, start-up time."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from importlib import import_module, metadata

import pytest

from tests.support.processes import COMMAND, finish, start
from tests.support.tiny_models_on_disk import words

PROMPT = words(5, 17, 40, 33, 8, 61)
#: More tokens than any test waits for.
ENDLESS = ("--max-tokens", "1000000", "--capacity", "1100000")


def endless_words(run, directory, count):
    """The first words of an answer that no end token can stop, from the same command."""
    arguments = ("generate", PROMPT, "--model", directory, "--max-tokens", count, "--json")
    facts = json.loads(run(*arguments).stdout)
    assert facts["finish_reason"] == "length"
    return facts["text"].split()


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_made(run, llama):
    process = start(
        "generate",
        PROMPT,
        "--model",
        llama,
        *ENDLESS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, errors = finish(process)
    assert process.returncode == 130
    made = begun + rest
    assert made.endswith("\n")
    count = min(len(made.split()), 10)
    assert count >= 5
    assert made.split()[:count] == endless_words(run, llama, 10)[:count]
    lines = errors.splitlines()
    assert lines[-1] == "interrupted"
    assert lines[0].startswith("cache   ")
    assert "Traceback" not in errors


def test_ctrl_c_under_json(run, llama, monkeypatch):
    generate = import_module("mlx_lm.generate")
    stream = generate.stream_generate

    def broken_off(*arguments, **options):
        for count, response in enumerate(stream(*arguments, **options)):
            if count == 5:
                raise KeyboardInterrupt
            yield response

    arguments = ("generate", PROMPT, "--model", llama, "--max-tokens", "20", "--json")
    whole = json.loads(run(*arguments).stdout)
    monkeypatch.setattr(generate, "stream_generate", broken_off)
    result = run(*arguments)
    assert result.exit_code == 130
    facts = json.loads(result.stdout)
    assert facts["finish_reason"] == "interrupted"
    assert facts["token_ids"] == whole["token_ids"][:5]
    assert facts["text"].split() == whole["text"].split()[:5]
    assert result.stderr == "interrupted\n"


def test_ctrl_c_while_the_model_loads(run, llama, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_kvcache.models.load", interrupted)
    result = run("generate", PROMPT, "--model", llama)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_reader_that_goes_away_ends_it_quietly(llama, command):
    arguments = ("generate", PROMPT, "--model", llama, *ENDLESS)
    if command == "inspect":
        arguments = ("inspect", llama)
    read, write = os.pipe()
    process = start(*arguments, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    if command == "generate":
        assert os.read(read, 1) == b"w"
    os.close(read)
    _, errors = finish(process)
    assert process.returncode == 141
    assert errors == ""


def on_a_terminal(*arguments):
    """What a command writes to stderr when that is a terminal, and its stdout."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = start(*arguments, stdout=subprocess.PIPE, stderr=follower, env=environment)
    os.close(follower)
    shown = bytearray()
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            part = b""
        if not part:
            break
        shown += part
    output, _ = finish(process)
    os.close(leader)
    assert process.returncode == 0, shown
    return shown.decode(), output


@pytest.mark.slow
def test_a_long_prefill_shows_a_bar_on_a_terminal_only(run, llama):
    prompt = words(*(3 + number % 90 for number in range(400)))
    arguments = ("generate", prompt, "--model", llama, "--max-tokens", "4", "--prefill-step", "50")
    shown, answer = on_a_terminal(*arguments)
    assert "reading the prompt" in shown
    assert "400/400" in shown
    assert shown.index("reading the prompt") < shown.index("cache   ")
    piped = run(*arguments)
    assert piped.exit_code == 0
    assert "reading the prompt" not in piped.stderr
    assert "\x1b" not in piped.stderr
    assert piped.stdout == answer


@pytest.mark.slow
def test_a_batch_shows_a_bar_on_a_terminal(llama, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n{words(7)}\n")
    shown, answers = on_a_terminal("batch", file, "--model", llama, "--max-tokens", "4")
    assert "answering" in shown
    assert "tokens/s" in shown[: shown.index("batch   2 finished")]
    assert len(answers.splitlines()) == 2


@pytest.mark.slow
def test_a_short_prompt_shows_no_bar(run, llama):
    shown, answer = on_a_terminal("generate", PROMPT, "--model", llama, "--max-tokens", "4")
    assert "reading the prompt" not in shown
    assert "speed" in shown
    assert answer.split() == endless_words(run, llama, 4)


@pytest.mark.slow
def test_an_error_is_red_on_a_terminal():
    leader, follower = pty.openpty()
    process = start(
        "generate", "--temp", "-1", "hi", stderr=follower, env={**os.environ, "TERM": "xterm"}
    )
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    finish(process)
    os.close(leader)
    assert process.returncode == 2
    assert "\x1b[1;31merror: --temp must be" in shown


@pytest.mark.slow
def test_a_narrow_stdout_encoding_takes_any_text(llama):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([*COMMAND, "inspect", str(llama)], capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert b"ring" in result.stdout
    assert result.stdout.isascii()


@pytest.mark.slow
def test_versions():
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    names = ("mlx-kvcache", "mlx", "mlx-lm", "transformers")
    assert result.stdout.splitlines() == [f"{name} {metadata.version(name)}" for name in names]


def test_no_command_shows_the_help(run):
    result = run()
    assert result.exit_code == 0
    assert "generate" in result.stdout
    assert "inspect" in result.stdout
