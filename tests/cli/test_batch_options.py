"""`batch` serves every option of one answer as `generate` does, from the flag and from the line."""

from __future__ import annotations

import json

import pytest

from tests.support.tiny_models_on_disk import words

COUNT = 12
PROMPT = words(5, 17, 40, 33)
#: Options under the names of a line, each changing the answer of a tiny model.
OPTIONS = {
    "stop": {"stop": ["STOP"]},
    "a single stop": {"stop": "STOP"},
    "a stop that never comes": {"stop": ["nowhere"]},
    "repetition": {"repetition_penalty": 3.0, "repetition_context_size": 0},
    "presence": {"presence_penalty": 9.0, "presence_context_size": 0},
    "frequency": {"frequency_penalty": 9.0, "frequency_context_size": 0},
    "top k": {"temp": 1.5, "seed": 3, "top_k": 5},
    "min p": {"temp": 1.5, "seed": 3, "min_p": 0.2},
    "xtc": {"temp": 1.5, "seed": 3, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    "prefill": {"prefill_response": words(7, 8)},
    "prefill and stop": {"prefill_response": words(7, 8), "stop": ["STOP", "w1", " w2"]},
}
FIELDS = ("text", "token_ids", "finish_reason", "stop_text", "prompt_tokens")


def with_stop(options, text):
    """The options, with a word from the middle of an answer in place of STOP."""
    stop = text.split()[5]
    return json.loads(json.dumps(options).replace("STOP", stop))


def flags(options):
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            yield from (f"--{name.replace('_', '-')}", each)


@pytest.fixture
def generated(run, chatty):
    def facts(options):
        result = run(
            "generate", PROMPT, "-m", chatty, "--max-tokens", COUNT, "--json", *flags(options)
        )
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return facts


@pytest.fixture
def batched(run, chatty):
    def answers(*lines, options=()):
        stdin = "\n".join(map(json.dumps, lines))
        result = run("batch", "-m", chatty, "--max-tokens", COUNT, *options, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        assert f"batch   {len(lines)} finished, 0 failed, 0 unfinished" in result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return answers


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_means_what_it_means_to_generate(generated, batched, name):
    plain = generated({})
    options = with_stop(OPTIONS[name], plain["text"])
    expected = generated(options)
    assert (expected["token_ids"] != plain["token_ids"]) == ("never" not in name)
    line = {"prompt": PROMPT, **options}
    other = {"prompt": words(9, 8), "max_tokens": 30}
    from_line = batched(other, line, {"prompt": PROMPT})
    from_flag = batched({"prompt": PROMPT}, options=list(flags(options)))
    for answer in (from_line[1], from_flag[0]):
        assert {each: answer[each] for each in FIELDS} == {each: expected[each] for each in FIELDS}
    assert from_line[2]["token_ids"] == plain["token_ids"]


def test_a_stop_text_across_tokens_ends_it_at_once(generated, batched):
    said = generated({})["text"].split()
    stop = f"{said[3]} {said[4]}"
    (answer,) = batched({"prompt": PROMPT, "stop": stop, "max_tokens": 400})
    assert answer["text"].split() == said[:3]
    assert (answer["finish_reason"], answer["stop_text"]) == ("stop", stop)
    assert answer["generated_tokens"] == 5


def test_arguments_of_the_template_vary_by_line(run, tmp_path):
    from tests.support.tiny_models_on_disk import write_model

    template = (
        "{% for message in messages %}w{{ mode | default(90) }} {{ message.content }} {% endfor %}"
        "w92"
    )
    model = write_model(tmp_path / "model", template=template)

    def tokens(*arguments, stdin=None):
        result = run(*arguments, "-m", model, "--max-tokens", COUNT, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        return [json.loads(line)["token_ids"] for line in result.stdout.splitlines()]

    lines = (
        {"prompt": "w5"},
        {"prompt": "w5", "chat_template_args": {"mode": 70}},
        {"prompt": "w5", "chat_template_kwargs": {"mode": 71}},
        {"messages": [{"role": "user", "content": "w5"}], "chat_template_args": '{"mode": 70}'},
    )
    answers = tokens("batch", stdin="\n".join(map(json.dumps, lines)))
    heads = (90, 70, 71, 70)
    expected = [tokens("generate", words(head, 5, 92), "--raw", "--json")[0] for head in heads]
    assert answers == expected
    assert len({tuple(each) for each in expected}) == 3


def test_messages_may_have_a_prefill(run, chatty):
    line = {"messages": [{"role": "user", "content": "w5"}], "prefill_response": "w7"}
    result = run("batch", "-m", chatty, "--max-tokens", COUNT, stdin=json.dumps(line))
    raw = run(
        "generate", words(90, 5, 92, 7), "--raw", "-m", chatty, "--max-tokens", COUNT, "--json"
    )
    assert json.loads(result.stdout)["token_ids"] == json.loads(raw.stdout)["token_ids"]
