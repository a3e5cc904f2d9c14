"""`batch --output`: what is kept, what is done again, and what is refused before it is touched."""

from __future__ import annotations

import json
import os
import resource
from importlib import import_module

import pytest
from typer.testing import CliRunner

from mlx_kvcache.commands import batch_file
from mlx_kvcache.commands.app import app
from mlx_kvcache.engine import Engine
from tests.support.tiny_models_on_disk import words

COUNT = 9
PROMPTS = tuple(words(*numbers) for numbers in ((5, 17, 40), (8, 61, 22, 9), (7,), (5, 12), (33,)))
STDIN = "\n".join(PROMPTS)
TIMES = ("queue_seconds", "first_token_seconds", "total_seconds")


def without_times(text):
    """The results as bytes, in the order of their lines, but for how long they took."""
    results = [json.loads(line) for line in text.splitlines()]
    timeless = [
        {name: value for name, value in each.items() if name not in TIMES} for each in results
    ]
    return [json.dumps(each).encode() for each in sorted(timeless, key=lambda each: each["line"])]


@pytest.fixture
def batch(run, llama, tmp_path):
    """Run `batch` over the prompts, into a file unless told otherwise."""

    def invoke(*options, stdin=STDIN, output=tmp_path / "results"):
        into = ("--output", output) if output else ()
        return run("batch", "-m", llama, "--max-tokens", COUNT, *into, *options, stdin=stdin)

    return invoke


@pytest.fixture
def output(tmp_path):
    return tmp_path / "results"


@pytest.fixture(scope="module")
def whole(llama):
    """The results of a run that nothing disturbs."""
    arguments = ["batch", "-m", str(llama), "--max-tokens", str(COUNT)]
    result = CliRunner().invoke(app, arguments, input=STDIN)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def submitted(monkeypatch):
    """The prompts that an engine was asked for, in tokens."""
    asked = []
    submit = Engine.submit

    def noted(engine, prompt, **choices):
        asked.append(tuple(prompt))
        return submit(engine, prompt, **choices)

    monkeypatch.setattr(Engine, "submit", noted)
    return asked


def tokens_of(*places):
    return [tuple(int(word[1:]) for word in PROMPTS[place].split()) for place in places]


def refused(result, said):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert said in line


def test_a_file_and_standard_output_have_the_same_results(batch, output, whole):
    assert batch("--sessions", 2).exit_code == 0
    assert without_times(output.read_text()) == without_times(whole)
    other = batch(output=None, stdin=STDIN.replace("w61", "w62")).stdout
    differing = zip(without_times(whole), without_times(other), strict=True)
    assert [one == other for one, other in differing] == [True, False, True, True, True]


def test_resume_answers_what_has_no_answer(batch, output, whole, submitted):
    lines = whole.splitlines(keepends=True)
    output.write_text(lines[3] + lines[1])
    before = output.stat().st_ino
    result = batch("--resume")
    assert result.exit_code == 0, result.stderr
    assert submitted == tokens_of(0, 2, 4)
    assert "3 finished, 0 failed, 0 unfinished, 2 kept from before" in result.stderr
    text = output.read_text()
    assert text.startswith(lines[3] + lines[1])
    assert without_times(text) == without_times(whole)
    assert output.stat().st_ino == before


def test_resume_without_a_file_begins_one(batch, output, whole):
    assert batch("--resume").exit_code == 0
    assert without_times(output.read_text()) == without_times(whole)


def test_resume_of_a_whole_file_loads_no_model(batch, output, whole, monkeypatch):
    output.write_text(whole)
    monkeypatch.setattr("mlx_kvcache.models.load", lambda *_a, **_k: pytest.fail("loaded"))
    result = batch("--resume")
    assert result.exit_code == 0, result.stderr
    assert "nothing left to answer, 5 kept from before" in result.stderr
    assert output.read_text() == whole


@pytest.mark.parametrize("cut", [1, 9, 10, 40, -1])
def test_a_torn_last_line_is_answered_again(batch, output, whole, submitted, cut):
    lines = whole.splitlines(keepends=True)
    output.write_text("".join(lines[:2]) + lines[2][:cut])
    assert batch("--resume").exit_code == 0
    assert submitted == tokens_of(2, 3, 4)
    text = output.read_text()
    assert text.startswith("".join(lines[:2]))
    assert without_times(text) == without_times(whole)


def test_failed_lines_are_tried_again(batch, output, whole, submitted):
    lines = whole.splitlines(keepends=True)
    failed = json.dumps({**json.loads(lines[1]), "error": "broken", "finish_reason": "failed"})
    output.write_text(lines[0] + failed + "\n" + lines[4])
    assert batch("--resume").exit_code == 0
    assert submitted == tokens_of(1, 2, 3)
    text = output.read_text()
    assert text.startswith(lines[0] + lines[4])
    assert without_times(text) == without_times(whole)


def test_more_lines_may_have_come(batch, output, whole, submitted):
    assert batch(stdin="\n".join(PROMPTS[:3])).exit_code == 0
    submitted.clear()
    assert batch("--resume").exit_code == 0
    assert submitted == tokens_of(3, 4)
    assert without_times(output.read_text()) == without_times(whole)


def test_seeds_are_those_of_the_line(batch, output):
    options = ("--temp", "1.5", "--seed", "5")
    drawn = batch(*options, output=None).stdout
    output.write_text("".join(drawn.splitlines(keepends=True)[::2]))
    assert batch(*options, "--resume").exit_code == 0
    assert without_times(output.read_text()) == without_times(drawn)


@pytest.mark.parametrize(
    ("options", "stdin"),
    [
        ((), STDIN.replace("w61", "w62")),
        ((), "\n".join([PROMPTS[0], json.dumps({"prompt": PROMPTS[1], "id": 3})])),
        ((), "\n".join([PROMPTS[0], json.dumps({"prompt": PROMPTS[1], "max_tokens": 3})])),
        ((), PROMPTS[0]),
        ((), PROMPTS[0] + "\n\n" + PROMPTS[1]),
        ((), "{\n" + STDIN),
        (("--temp", "1"), STDIN),
        (("--kv-dtype", "float16"), STDIN),
    ],
)
def test_a_changed_input_is_refused(batch, output, whole, submitted, options, stdin):
    before = "".join(whole.splitlines(keepends=True)[:2]) + '{"line": 3, "te'
    output.write_text(before)
    submitted.clear()
    result = batch("--resume", "--skip-invalid", *options, stdin=stdin)
    refused(result, "and that line now asks for something else")
    assert submitted == []
    assert output.read_text() == before


@pytest.mark.parametrize("options", [("--sessions", "2"), ("--spare", "9"), ("--cache", "batched")])
def test_how_it_is_run_may_change(batch, output, whole, options):
    output.write_text(whole.splitlines(keepends=True)[0])
    assert batch("--resume", *options).exit_code == 0
    assert without_times(output.read_text()) == without_times(whole)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("my notes\n", "line 1 of --output"),
        ("my notes", "line 1 of --output"),
        ('{"line": 1}\n', "line 1 of --output"),
        ('{"line": "1", "error": null, "input_hash": "a"}\n', "line 1 of --output"),
        ('["line", "error"]\n', "line 1 of --output"),
        ("\n", "line 1 of --output"),
        ('{"line": 9, "error": "x", "input_hash": null}\nrest', "line 2 of --output"),
        ('{"line": 1, "error": null, "input_hash": "a"}\n' * 2, "two results of line 1"),
    ],
)
def test_a_file_that_is_not_of_results_is_left_alone(batch, output, submitted, text, said):
    output.write_text(text)
    refused(batch("--resume"), said)
    assert submitted == []
    assert output.read_text() == text


def test_flags_about_files(batch, output, submitted, tmp_path):
    refused(batch("--resume", output=None), "--resume is about the file of --output")
    refused(batch("--overwrite", output=None), "--overwrite is about the file of --output")
    refused(batch("--resume", "--overwrite"), "give one of them")
    refused(batch(output=tmp_path), "not a regular file")
    refused(batch("--overwrite", output=os.devnull), "not a regular file")
    output.write_text("mine")
    refused(batch(), "give another name, --resume to go on, or --overwrite")
    assert submitted == []
    assert output.read_text() == "mine"


def test_the_file_of_the_prompts_is_no_output(run, llama, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text(STDIN)
    (tmp_path / "link").symlink_to(prompts)
    for name in (prompts, tmp_path / "link"):
        result = run("batch", prompts, "-m", llama, "--overwrite", "-o", name)
        refused(result, "is the file of the prompts")
    assert prompts.read_text() == STDIN


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_two_runs_cannot_write_to_one_file(batch, output, whole, submitted, option):
    output.write_text(whole.splitlines(keepends=True)[0])
    before = output.read_text()
    held = batch_file.hold(output)
    submitted.clear()
    refused(batch(option), "another run is writing to --output")
    os.close(held)
    assert submitted == []
    assert output.read_text() == before
    assert batch(option).exit_code == 0


def test_overwrite_keeps_the_old_file_until_a_result(batch, output, monkeypatch):
    output.write_text("old")
    refused(batch("--overwrite", "--capacity", "3"), "positions")
    assert output.read_text() == "old"

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_advance", interrupted)
        assert batch("--overwrite").exit_code == 130
    assert output.read_text() == "old"
    assert [path.name for path in output.parent.iterdir()] == ["results"]


def test_a_link_stays_one(batch, output, whole, tmp_path):
    target = tmp_path / "target"
    target.write_text("old")
    output.symlink_to(target)
    assert batch("--overwrite").exit_code == 0
    assert output.is_symlink()
    assert without_times(target.read_text()) == without_times(whole)


def test_a_refused_run_leaves_no_file(batch, output):
    assert batch("--capacity", "3").exit_code == 2
    assert batch(stdin="w5\n{\n").exit_code == 2
    assert not output.exists()


@pytest.mark.parametrize("room", [0, 1, 700, 1500])
def test_a_full_disk_ends_in_one_line_and_can_be_resumed(batch, output, whole, room):
    """The limit of a file's size stands for the disk's: a write over it fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        result = batch("--sessions", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line == (
        f"error: [Errno 27] File too large; --resume keeps the results that are in the file: "
        f"'{output}'"
    )
    text = output.read_text() if output.exists() else ""
    assert len(text) <= room
    assert without_times(text) == without_times(whole)[: len(text.splitlines())]
    assert (len(text.splitlines()) > 0) == (room >= 700)
    assert batch("--resume").exit_code == 0
    assert output.read_text().startswith(text)
    assert without_times(output.read_text()) == without_times(whole)


def test_unordered_results_come_as_they_finish(batch):
    stdin = "\n".join(
        json.dumps({"prompt": text, "max_tokens": count})
        for text, count in zip(PROMPTS, (30, 2, 20, 1, 10), strict=True)
    )
    ordered, unordered = (batch(*each, stdin=stdin, output=None) for each in ((), ("--unordered",)))
    numbers = [json.loads(line)["line"] for line in unordered.stdout.splitlines()]
    assert numbers == [4, 2, 5, 3, 1]
    assert without_times(unordered.stdout) == without_times(ordered.stdout)
    assert [json.loads(line)["line"] for line in ordered.stdout.splitlines()] == [1, 2, 3, 4, 5]


BROKEN = {2: "{", 3: '{"prompt": "w5", "id": 7, "maxtokens": 3}', 5: json.dumps(words(*[5] * 600))}


@pytest.mark.parametrize("to_file", [False, True])
def test_lines_that_cannot_be_answered_are_skipped(batch, output, whole, to_file):
    lines = [BROKEN.get(number, text) for number, text in enumerate(PROMPTS, 1)]
    result = batch(
        "--skip-invalid", stdin="\n".join(lines), output=output if to_file else None
    )  # fmt: skip
    assert result.exit_code == 1
    assert "2 finished, 0 failed, 0 unfinished, 3 invalid" in result.stderr
    text = output.read_text() if to_file else result.stdout
    answers = {each["line"]: each for each in map(json.loads, text.splitlines())}
    if not to_file:
        assert list(answers) == [1, 2, 3, 4, 5]
    assert [answers[number]["finish_reason"] for number in BROKEN] == ["invalid"] * 3
    assert "not valid JSON" in answers[2]["error"]
    assert "unknown field 'maxtokens'" in answers[3]["error"]
    assert "need 609 positions" in answers[5]["error"]
    assert answers[3]["text"] == ""
    assert {tuple(each) for each in answers.values()} == {tuple(answers[1])}
    kept = [json.dumps(answers[number]) for number in (1, 4)]
    expected = without_times(whole)
    assert without_times("\n".join(kept)) == [expected[0], expected[3]]


def test_repaired_lines_are_answered_by_a_resumed_run(batch, output, whole, submitted):
    lines = [BROKEN.get(number, text) for number, text in enumerate(PROMPTS, 1)]
    assert batch("--skip-invalid", stdin="\n".join(lines)).exit_code == 1
    submitted.clear()
    assert batch("--resume").exit_code == 0
    assert submitted == tokens_of(1, 2, 4)
    assert without_times(output.read_text()) == without_times(whole)


def test_only_lines_that_cannot_be_answered(batch, output):
    result = batch("--skip-invalid", stdin="{\n")
    assert result.exit_code == 1
    assert "nothing left to answer, 1 invalid" in result.stderr
    (answer,) = map(json.loads, output.read_text().splitlines())
    assert (answer["line"], answer["finish_reason"]) == (1, "invalid")


def test_a_token_that_the_model_lacks_is_refused_with_its_line(batch, monkeypatch):
    check = import_module("mlx_kvcache.engine.engine").check_prompt
    monkeypatch.setattr(
        "mlx_kvcache.engine.engine.check_prompt",
        lambda prompt, vocabulary: check(prompt, min(vocabulary, 50)),
    )
    refused(batch(output=None), "line 2: token 1 of the prompt is 61")
    result = batch("--skip-invalid", output=None)
    assert result.exit_code == 1
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["finish_reason"] == "invalid" for each in answers] == [False, True] + [False] * 3
