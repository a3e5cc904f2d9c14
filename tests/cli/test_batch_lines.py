"""One line of `batch`: messages, options of its own, OpenAI's form, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.commands.batch_fields import ALIASES, WHOLE_RUN, line_options, option_names
from mlx_kvcache.commands.batch_input import BatchOptions, parse_lines
from mlx_kvcache.commands.options import RunOptions
from mlx_kvcache.engine import Engine
from tests.support.tiny_models_on_disk import words

COUNT = 9
USER, ASSISTANT, END = 90, 91, 92
TALK = (("system", 8), ("user", 5), ("assistant", 17), ("user", 40))


def message(role, *numbers):
    return {"role": role, "content": words(*numbers)}


def results(run, model, *lines, options=()):
    stdin = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    result = run("batch", "-m", model, "--max-tokens", COUNT, *options, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def tokens(run, model, *lines, options=()):
    return [answer["token_ids"] for answer in results(run, model, *lines, options=options)]


def raw_tokens(run, model, *numbers):
    """What `generate` answers to these tokens as they are."""
    result = run(
        "generate", words(*numbers), "-m", model, "--max-tokens", COUNT, "--raw", "--json"
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["prompt_tokens"] == len(numbers)
    return facts["token_ids"]


def refusal(run, model, line, options=()):
    text = line if isinstance(line, str) else json.dumps(line)
    result = run("batch", "-m", model, *options, stdin=f"w7\n{text}\nw9\n")
    assert result.exit_code == 2, result.stdout
    assert result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith("error: line 2: ")
    return said


def test_messages_are_rendered_whole(run, chatty):
    talk = [message(role, number) for role, number in TALK]
    longer = [*talk[:-1], message("user", 41)]
    parts = [{"type": "text", "text": "w4"}, {"type": "text", "text": "0"}]
    in_parts = [*talk[:-1], {"role": "user", "content": parts}]
    answers = tokens(run, chatty, *({"messages": each} for each in (talk, longer, in_parts)))
    rendered = (ASSISTANT, 8, USER, 5, ASSISTANT, 17, USER, 40, END)
    assert answers[0] == answers[2] == raw_tokens(run, chatty, *rendered)
    assert answers[1] == raw_tokens(run, chatty, *rendered[:-2], 41, END) != answers[0]


def test_one_message_is_a_prompt(run, chatty):
    prompt, messages = tokens(
        run, chatty, {"prompt": words(5, 6)}, {"messages": [message("user", 5, 6)]}
    )
    assert prompt == messages == raw_tokens(run, chatty, USER, 5, 6, END)


def test_a_system_prompt_goes_before_messages_that_have_none(run, chatty):
    own = [message("system", 8), message("user", 5)]
    lines = (
        {"messages": own[1:]},
        {"messages": own},
        {"messages": own[1:], "system": "w6"},
        {"messages": own[1:], "system": None},
    )
    answers = tokens(run, chatty, *lines, options=("--system", "w7"))
    heads = ((ASSISTANT, 7), (ASSISTANT, 8), (ASSISTANT, 6), ())
    assert answers == [raw_tokens(run, chatty, *head, USER, 5, END) for head in heads]
    assert len(set(map(tuple, answers))) == 4
    both = refusal(run, chatty, {"messages": own, "system": "w6"})
    assert 'a "system" and a system message' in both


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "and not empty"),
        ("w5", '"messages" must be a list'),
        (["w5"], "message 1 must be an object"),
        ([{"content": "w5"}], '"role" of message 1 must be one of system, developer, user'),
        ([{"role": "User", "content": "w5"}], "got 'User'"),
        ([{"role": "user"}], '"content" of message 1 must be a string'),
        ([{"role": "user", "content": None}], "got None"),
        ([{"role": "user", "content": []}], "got []"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], 'parts of type "text"'),
        ([{"role": "user", "text": "w5"}], "unknown field 'text'"),
        ([{"role": "user", "contents": "w5"}], "did you mean 'content'?"),
        ([{"role": "user", "content": " "}], "the last message is blank"),
        ([message("user", 5), message("assistant", 6)], "the last message is the assistant's"),
        ([message("user", 9), message("system", 9), message("user", 5)], "template refuses"),
        ([message("user", *[5] * 300)], "need 558 positions"),
    ],
)
def test_messages_that_cannot_be(run, chatty, monkeypatch, messages, said):
    monkeypatch.setattr(Engine, "_advance", lambda _: pytest.fail("something was computed"))
    assert said in refusal(run, chatty, {"messages": messages})


def test_a_surrogate_in_a_message(run, chatty):
    line = r'{"messages": [{"role": "user", "content": "\ud800"}]}'
    assert "message 1 holds half of a surrogate pair" in refusal(run, chatty, line)


def test_messages_need_a_template(run, llama, chatty):
    line = {"messages": [message("user", 5)]}
    assert "no chat template to put messages into" in refusal(run, llama, line)
    assert "--raw" in refusal(run, chatty, line, options=("--raw",))
    assert '"raw"' in refusal(run, chatty, {**line, "raw": True})
    assert "give one of them" in refusal(run, chatty, {**line, "prompt": "w5"})
    refused = refusal(run, chatty, {"messages": [message("system", 9), message("user", 5)]})
    assert refused.startswith(
        "error: line 2: the model's chat template refuses this: no such system prompt; change the "
        "messages"
    )


def test_every_option_of_one_answer_may_vary_by_line():
    names = {one.name for one in fields(RunOptions)}
    assert names >= WHOLE_RUN
    assert set(line_options()) == names - WHOLE_RUN
    assert set(line_options()) >= {"max_tokens", "temp", "top_p", "seed", "system", "raw"}
    assert set(ALIASES.values()) <= set(line_options())
    assert not set(ALIASES) & names


@pytest.mark.parametrize("name", sorted(line_options()))
def test_an_option_of_another_type_is_refused(run, llama, name):
    said = refusal(run, llama, {"prompt": "w5", name: [{"a": 1}]})
    assert f"{name!r} must be" in said
    assert "got [{'a': 1}]" in said


def test_a_line_may_be_raw(run, chatty):
    with_template, raw = tokens(run, chatty, "w5", {"prompt": "w5", "raw": True})
    assert with_template == raw_tokens(run, chatty, USER, 5, END)
    assert raw == raw_tokens(run, chatty, 5) != with_template


def test_other_spellings(run, llama):
    ours = {"prompt": "w5", "temp": 1.5, "seed": 3, "max_tokens": 4}
    theirs = {"prompt": "w5", "temperature": 1.5, "seed": 3, "max_completion_tokens": 4}
    drawn, same, greedy = tokens(run, llama, ours, theirs, "w5")
    assert drawn == same
    assert len(drawn) == 4
    assert greedy[:4] != drawn
    said = refusal(run, llama, {"prompt": "w5", "temp": 1, "temperature": 1})
    assert "'temp' is given twice, also as 'temperature'" in said


def test_null_is_a_value_where_it_is_one(run, llama):
    lines = ['{"prompt": "w5", "seed": null}', '{"prompt": "w5"}', '{"prompt": "w5", "seed": 7}']
    prompts, _ = parse_lines(lines, BatchOptions(seed=3), plain=False)
    assert [prompt.options.seed for prompt in prompts] == [None, 4, 7]
    assert "'temp' must be a number, got None" in refusal(
        run, llama, {"prompt": "w5", "temp": None}
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"promt": "w5"}, "unknown field 'promt'; did you mean 'prompt'?"),
        ({"prompt": "w5", "maxtokens": 3}, "did you mean 'max_tokens'?"),
        ({"prompt": "w5", "temprature": 3}, "did you mean 'temperature'?"),
        ({"prompt": "w5", "zzz": 3}, "unknown field 'zzz'; there are prompt, messages, id, "),
        ({"prompt": "w5", "model": "other"}, "change --model"),
        ({"prompt": "w5", "kv_dtype": "float16"}, "is None for the whole run"),
        ({"prompt": "w5", "temp": True}, "'temp' must be a number, got True"),
        ('{"prompt": "w5", "prompt": "w6"}', "'prompt' is given twice"),
        ('{"prompt": "w5", "temp": NaN}', "NaN is no number"),
        ('{"prompt": "w5", "id": -Infinity}', "-Infinity is no number"),
        ('{"prompt": "w5", "id": 1e999}', "1e999 is no number"),
        ('{"prompt": "w5", "temp": ' + "9" * 400 + "}", "'temp' must be a number"),
        ('{"prompt": "w5", "seed": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"prompt": ' + "[" * 100_000, "not valid JSON"),
        ('{"prompt": "w5"} {}', "not valid JSON (Extra data at column 18)"),
        (r'{"prompt": "w5", "system": "\ud800"}', "surrogate"),
        ({"prompt": "w5", "system": "w6", "raw": True}, "--raw turns off"),
    ],
)
def test_a_line_that_cannot_be_says_why(run, llama, line, said):
    assert said in refusal(run, llama, line)


def test_an_option_of_the_whole_run_may_be_said_again(run, llama):
    assert tokens(run, llama, {"prompt": "w5", "model": str(llama)}) == tokens(run, llama, "w5")


def openai(body, url="/v1/chat/completions", **changes):
    return {"custom_id": "a-1", "method": "POST", "url": url, "body": body, **changes}


def test_lines_of_openai_batches(run, chatty):
    chat = {
        "model": str(chatty), "messages": [message("user", 5)], "max_completion_tokens": 4,
        "temperature": 0, "n": 1, "stream": False, "seed": None,
    }  # fmt: skip
    plain = {"model": str(chatty), "prompt": words(5, 6), "max_tokens": 3}
    lines = (openai(chat), openai(plain, "/v1/completions", custom_id="b"))
    first, second = results(run, chatty, *lines)
    assert (first["id"], second["id"]) == ("a-1", "b")
    assert first["token_ids"] == raw_tokens(run, chatty, USER, 5, END)[:4]
    assert second["token_ids"] == raw_tokens(run, chatty, 5, 6)[:3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (openai({"messages": []}), "and not empty"),
        (openai({"prompt": "w5", "n": 2}), "'n' must be 1"),
        (openai({"prompt": "w5", "stream": True}), "'stream' must be false"),
        (openai({"prompt": "w5", "model": "gpt-4o"}), "'model' is 'gpt-4o', but is "),
        (openai({"prompt": "w5", "tools": []}), "unknown field 'tools'"),
        (openai({"prompt": "w5", "id": 1}), "unknown field 'id'"),
        (openai({"input": "w5"}, "/v1/embeddings"), "'POST' to '/v1/embeddings'"),
        (openai({"prompt": "w5"}, method="GET"), "got 'GET' to"),
        (openai("w5"), '"body" must be an object'),
        ({"custom_id": "a", "prompt": "w5"}, "unknown field 'prompt'"),
        ({"custom_id": "a", "url": "/v1/completions"}, '"body" must be an object'),
    ],
)
def test_lines_of_openai_that_cannot_be(run, chatty, line, said):
    assert said in refusal(run, chatty, line)


NAMES = ("prompt", "messages", "id", "role", "content", "custom_id", "body", "url", *option_names())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from(["user", "assistant", "/v1/completions", "w5"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), st.booleans())
def test_whatever_a_line_holds_is_read_or_refused(fields, is_talk):
    if is_talk:
        fields = {**fields, "messages": [{"role": "user", "content": "w5"}]}
    line = json.dumps(fields)
    prompts, refusals = parse_lines(["w7", line], BatchOptions(seed=3), plain=False)
    assert prompts[0].content == "w7"
    assert [each.line for each in (*prompts, *refusals)] == [1, 2]
    for prompt in prompts[1:]:
        again, _ = parse_lines(["", line], BatchOptions(seed=3), plain=False)
        assert again == [prompt]
        assert again[0].hash == prompt.hash != prompts[0].hash
