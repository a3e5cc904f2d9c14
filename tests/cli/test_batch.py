"""`batch`: the answers of `generate`, in input order, and every line refused that cannot be."""

from __future__ import annotations

import json
import re

import pytest

from mlx_kvcache.engine import Engine
from tests.support.tiny_models_on_disk import words, write_model

PROMPTS = ((5, 17, 40, 33), (8, 61, 22, 9, 90, 13, 77, 4), (7,), (5, 17, 40, 9, 12))
COUNT = 9


def lines_of(*prompts):
    return "".join(words(*prompt) + "\n" for prompt in prompts)


def results(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def alone(run, model, prompt, *options):
    result = run("generate", words(*prompt), "-m", model, "--max-tokens", COUNT, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["cell", "batched"])
def test_the_answers_of_generate_in_input_order(run, llama, tmp_path, kind):
    file = tmp_path / "prompts.txt"
    file.write_text(lines_of(*PROMPTS))
    answers = results(
        run("batch", file, "-m", llama, "--max-tokens", COUNT, "--cache", kind, "--sessions", 2)
    )
    for number, (answer, prompt) in enumerate(zip(answers, PROMPTS, strict=True), 1):
        expected = alone(run, llama, prompt)
        for field in ("text", "token_ids", "finish_reason", "prompt_tokens"):
            assert answer[field] == expected[field], field
        assert answer["line"] == number
        assert answer["error"] is None
    assert len({answer["text"] for answer in answers}) == len(PROMPTS)


def test_json_lines_have_their_own_options(run, llama):
    text = words(*PROMPTS[0])
    stdin = "\n".join(
        [
            json.dumps(text),
            "",
            json.dumps({"prompt": text, "max_tokens": 2, "id": ["a", 1]}),
            json.dumps({"prompt": text, "temp": 1.5, "seed": 3}),
        ]
    )
    answers = results(run("batch", "-", "-m", llama, "--max-tokens", COUNT, stdin=stdin))
    assert [answer["line"] for answer in answers] == [1, 3, 4]
    assert [answer["id"] for answer in answers] == [None, ["a", 1], None]
    greedy = alone(run, llama, PROMPTS[0])["token_ids"]
    assert answers[0]["token_ids"] == greedy
    assert answers[1]["token_ids"] == greedy[:2]
    drawn = alone(run, llama, PROMPTS[0], "--temp", 1.5, "--seed", 3)["token_ids"]
    assert answers[2]["token_ids"] == drawn
    assert drawn != greedy


def test_each_line_has_a_seed_of_its_own(run, llama):
    options = ("-m", llama, "--max-tokens", COUNT, "--temp", 1.0, "--seed", 5)
    answers = results(run("batch", *options, stdin=lines_of(*[PROMPTS[0]] * 3)))
    for number, answer in enumerate(answers):
        expected = alone(run, llama, PROMPTS[0], "--temp", 1.0, "--seed", 5 + number)
        assert answer["token_ids"] == expected["token_ids"]
    assert len({answer["text"] for answer in answers}) == 3


@pytest.mark.parametrize("kind", ["cell", "batched"])
def test_a_shared_prefix_gives_the_same_and_is_held_once(run, llama, kind):
    common = tuple(range(10, 50))
    prompts = [(*common, number, *PROMPTS[1]) for number in (60, 61, 62)]
    options = ("-m", llama, "--max-tokens", COUNT, "--cache", kind)
    apart = run("batch", *options, stdin=lines_of(*prompts))
    shared = run("batch", *options, "--share-prefix", stdin=lines_of(*prompts))
    fields = ("line", "text", "token_ids", "prompt_tokens")
    assert [[answer[field] for field in fields] for answer in results(shared)] == [
        [answer[field] for field in fields] for answer in results(apart)
    ]
    saved = int(re.search(r"(\d+) of them saved by sharing", shared.stderr)[1])
    assert saved == (3 * 40 if kind == "cell" else 0)
    assert "0 of them saved by sharing" in apart.stderr


def test_the_same_prompt_twice_can_share_its_prefix(run, llama):
    options = ("-m", llama, "--max-tokens", COUNT, "--share-prefix")
    answers = results(run("batch", *options, stdin=lines_of(PROMPTS[1], PROMPTS[1])))
    expected = alone(run, llama, PROMPTS[1])["token_ids"]
    assert [answer["token_ids"] for answer in answers] == [expected, expected]


def test_text_takes_every_line_as_it_is(run, llama):
    options = ("-m", llama, "--max-tokens", 2)
    refused = run("batch", *options, stdin='"w5 w6\n')
    assert refused.exit_code == 2
    assert "line 1: not valid JSON" in refused.stderr
    assert len(results(run("batch", *options, "--text", stdin='"w5 w6\n'))) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": 3}', '"prompt" must be a string'),
        ('{"prompt": "  "}', "not blank"),
        ('{"max_tokens": 3}', '"prompt" must be a string'),
        ('{"prompt": "w5", "tokens": 3}', "unknown field 'tokens'"),
        ('{"prompt": "w5", "max_tokens": 0}', "--max-tokens must be"),
        ('{"prompt": "w5", "max_tokens": "3"}', "must be an integer"),
        ('{"prompt": "w5", "temp": -1}', "--temp must be"),
        ('{"prompt": "w5", "seed": true}', "must be an integer"),
        ('{"prompt": "w5", "max_tokens": 600}', "need 601 positions"),
        (r'"w5 \ud800"', "surrogate"),
    ],
)
def test_a_line_that_cannot_be_is_refused_before_anything_is_computed(
    run, llama, monkeypatch, line, message
):
    monkeypatch.setattr(Engine, "_advance", lambda _: pytest.fail("something was computed"))
    result = run("batch", "-m", llama, stdin=f"w7\n{line}\nw9\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "line 2:" in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "stdin", "message"),
    [
        ((), "", "there are no prompts"),
        ((), " \n\n", "there are no prompts"),
        ((), b"w5\xff\n", "not valid UTF-8"),
        (("--sessions", "0"), "w5\n", "--sessions must be at least 1"),
        (("--prefill-budget", "3"), "w5\n", "--prefill-budget 3 is less"),
        (("--capacity", "9"), "w5 w6 w7\n", "need 259 positions, but one session has at most 9"),
        (("--cache", "paged"), "w5\n", "paged"),
        (("--temp", "-1"), "w5\n", "--temp"),
        (("--output", "/no/such/place/out"), "w5\n", "no directory"),
    ],
)
def test_options_that_cannot_be_are_refused(run, llama, options, stdin, message):
    result = run("batch", "-m", llama, *options, stdin=stdin)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_missing_file_and_an_unsupported_model(run, llama, tmp_path):
    missing = run("batch", tmp_path / "none.txt", "-m", llama)
    assert missing.exit_code == 2
    assert "there is no file" in missing.stderr
    assert "none.txt" in missing.stderr
    (tmp_path / "file").touch()
    for name in (tmp_path / "file" / "x", "x" * 300, "~nobody-of-this-name/x"):
        nowhere = run("batch", name, "-m", llama)
        assert (nowhere.exit_code, len(nowhere.stderr.splitlines())) == (2, 1), nowhere.stderr
    folder = run("batch", tmp_path, "-m", llama)
    assert (folder.exit_code, "is a directory" in folder.stderr) == (2, True)
    hybrid = write_model(tmp_path / "hybrid", "qwen3_next")
    result = run("batch", "-m", hybrid, "--max-tokens", 2, stdin="w5\n")
    assert result.exit_code == 2
    assert "recurrent state" in result.stderr


def test_output_is_in_the_order_of_finishing_and_never_over_another_file(run, llama, tmp_path):
    output = tmp_path / "results.jsonl"
    options = ("-m", llama, "--max-tokens", COUNT, "--output", output)
    first = run("batch", *options, stdin=lines_of(*PROMPTS))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == ""
    written = output.read_text()
    # A prompt of one token is the first that is read, and so the first that is answered.
    assert [json.loads(line)["line"] for line in written.splitlines()] == [3, 1, 2, 4]
    refused = run("batch", *options, stdin=lines_of(PROMPTS[0]))
    assert refused.exit_code == 2
    assert "--overwrite" in refused.stderr
    assert output.read_text() == written
    assert run("batch", *options, "--overwrite", stdin=lines_of(PROMPTS[0])).exit_code == 0
    assert len(output.read_text().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("to_file", [False, True])
def test_an_interrupt_keeps_what_was_finished(run, llama, tmp_path, monkeypatch, to_file):
    """The second and the fourth prompt are short, and are finished before the first."""
    stdin = "\n".join(
        json.dumps({"prompt": words(*prompt), "max_tokens": count})
        for prompt, count in zip(PROMPTS, (60, 2, 60, 3), strict=True)
    )
    advance, steps = Engine._advance, iter(range(1000))

    def interrupted(engine):
        if next(steps) == 12:
            raise KeyboardInterrupt
        return advance(engine)

    monkeypatch.setattr(Engine, "_advance", interrupted)
    output = tmp_path / "results.jsonl"
    options = ("--output", output) if to_file else ()
    result = run("batch", "-m", llama, *options, stdin=stdin)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "2 finished, 0 failed, 2 unfinished" in result.stderr
    written = output.read_text() if to_file else result.stdout
    assert [json.loads(line)["line"] for line in written.splitlines()] == [2, 4]


def test_a_failed_prompt_is_a_result_and_a_status(run, llama, monkeypatch):
    original = Engine.submit

    def submit(engine, prompt, **choices):
        def broken(_):
            raise ValueError("broken")

        if tuple(prompt) == PROMPTS[1]:
            choices["sampler"] = broken
        return original(engine, prompt, **choices)

    monkeypatch.setattr(Engine, "submit", submit)
    result = run("batch", "-m", llama, "--max-tokens", COUNT, stdin=lines_of(*PROMPTS))
    assert result.exit_code == 1
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["error"] for answer in answers] == [None, "broken", None, None]
    assert answers[1]["finish_reason"] == "failed"


def test_figures_are_told_and_no_bar_in_a_pipe(run, llama):
    result = run("batch", "-m", llama, "--max-tokens", COUNT, stdin=lines_of(*PROMPTS))
    assert "batch   4 finished" in result.stderr
    assert re.search(r"cache   cell, \d+ of \d+ positions at most", result.stderr)
    assert re.search(r"decode 36 tokens at [\d.]+ tokens/s", result.stderr)
    assert "answering" not in result.stderr


def test_quiet_leaves_the_results_alone(run, llama):
    options = ("-m", llama, "--max-tokens", COUNT, "--quiet")
    result = run("batch", *options, stdin=lines_of(*PROMPTS))
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == len(PROMPTS)


def test_system_prompts_go_into_the_template(run, chatty):
    options = ("-m", chatty, "--max-tokens", COUNT, "--system", "w8")
    stdin = words(5) + "\n" + json.dumps({"prompt": words(5), "system": "w7"}) + "\n"
    first, second = results(run("batch", *options, stdin=stdin))
    assert first["token_ids"] == alone(run, chatty, (5,), "--system", "w8")["token_ids"]
    assert second["token_ids"] == alone(run, chatty, (5,), "--system", "w7")["token_ids"]
    assert first["token_ids"] != second["token_ids"]
    refused = run("batch", *options, stdin=json.dumps({"prompt": "w5", "system": "w9"}))
    assert refused.exit_code == 2
    assert "line 1: the model's chat template refuses" in refused.stderr
