"""The options of an answer: the tokens and log-probabilities that mlx-lm's own functions give."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_kvcache.models import load
from tests.support.tiny_models_on_disk import words, write_chat_model

PROMPT = (5, 17, 40, 33, 8, 61, 22, 9, 90, 13, 77, 4)
COUNT = 24


def reference(directory, prompt=PROMPT, seed=0, **options):
    """mlx-lm's responses on its own caches, and the text that they add up to."""
    model, tokenizer = mlx_lm.load(str(directory))
    mx.random.seed(seed)
    responses = list(stream_generate(model, tokenizer, list(prompt), max_tokens=COUNT, **options))
    return "".join(each.text for each in responses), responses


def tokens_of(directory, prompt=PROMPT, **options):
    return [each.token for each in reference(directory, prompt, **options)[1]]


@pytest.fixture
def ask(run, llama):
    """The facts of an answer of the tiny model."""

    def asked(*arguments, prompt=PROMPT, model=llama):
        base = ("generate", words(*prompt), "--model", model, "--max-tokens", COUNT, "--json")
        result = run(*base, *arguments)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return asked


@pytest.mark.parametrize(
    ("flags", "sampler", "processors"),
    [
        ("--temp 1.2 --top-k 3", {"temp": 1.2, "top_k": 3}, {}),
        ("--temp 1.2 --min-p 0.5", {"temp": 1.2, "min_p": 0.5}, {}),
        (
            "--temp 1.2 --min-p 0.9 --min-tokens-to-keep 3",
            {"temp": 1.2, "min_p": 0.9, "min_tokens_to_keep": 3},
            {},
        ),
        ("--repetition-penalty 1.7", {}, {"repetition_penalty": 1.7}),
        (
            "--repetition-penalty 1.7 --repetition-context-size 3",
            {},
            {"repetition_penalty": 1.7, "repetition_context_size": 3},
        ),
        (
            "--presence-penalty 1.5 --presence-context-size 0",
            {},
            {"presence_penalty": 1.5, "presence_context_size": 0},
        ),
        (
            "--frequency-penalty 0.9 --frequency-context-size 9",
            {},
            {"frequency_penalty": 0.9, "frequency_context_size": 9},
        ),
    ],
)
def test_tokens_are_chosen_as_mlx_lm_chooses_them(ask, llama, flags, sampler, processors):
    found = ask(*flags.split(), "--seed", "5")
    options = {
        "sampler": make_sampler(**sampler),
        "logits_processors": make_logits_processors(**processors),
    }
    assert found["token_ids"] == tokens_of(llama, seed=5, **options)
    plain = ("--temp", "1.2") if sampler else ()
    assert found["token_ids"] != ask(*plain, "--seed", "5")["token_ids"]
    assert found["sampling"].items() >= {**sampler, **processors}.items()


def test_xtc_spares_line_ends_and_ends_of_answers(ask, llama):
    flags = ("--temp", "1", "--seed", "5", "--xtc-probability", "0.8", "--xtc-threshold", "0.01")
    _, tokenizer = mlx_lm.load(str(llama))
    options = {
        "temp": 1.0,
        "xtc_probability": 0.8,
        "xtc_threshold": 0.01,
        "xtc_special_tokens": tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    }
    found = ask(*flags)["token_ids"]
    assert found == tokens_of(llama, seed=5, sampler=make_sampler(**options))
    assert found != ask(*flags[:4])["token_ids"]


def test_a_stop_text_ends_the_answer_before_it(ask, run, llama):
    text, responses = reference(llama)
    said = text.split()
    # From the middle of one word into the next, so that no token is the stop text.
    stop = f"{said[5][-1]} {said[6][:-1]}"
    place = text.index(stop)
    facts = ask("--stop", "nowhere", "--stop", stop)
    assert facts["text"] == text[:place]
    assert (facts["finish_reason"], facts["stop_text"]) == ("stop", stop)
    made = [each.token for each in responses]
    count = len(facts["token_ids"])
    assert facts["token_ids"] == made[:count]
    assert len(text[:place].split()) <= count <= 7
    assert facts["generated_tokens"] == count < COUNT
    shown = run("generate", words(*PROMPT), "--model", llama, "--stop", stop)
    assert shown.stdout == text[:place] + "\n"
    whole = ask("--stop", "nowhere")
    assert (whole["text"], whole["finish_reason"], whole["stop_text"]) == (text, "length", None)


def test_what_may_begin_a_stop_text_is_shown_when_the_answer_ends(run, llama):
    text, _ = reference(llama)
    last = text.split()[-1]
    for stop in (f"{last} and more", f"{last[-1]}!"):
        shown = run(
            "generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT, "--stop", stop
        )
        assert shown.stdout == text + "\n"


def test_logprobs_are_mlx_lms(ask, llama):
    _, responses = reference(llama)
    facts = ask("--logprobs", "3")["logprobs"]
    assert [each["token_id"] for each in facts] == [each.token for each in responses]
    for found, response in zip(facts, responses, strict=True):
        expected = np.array(response.logprobs.astype(mx.float32))
        order = np.argsort(-expected, kind="stable")[:3]
        assert [each["token_id"] for each in found["top"]] == order.tolist()
        shown = [each["logprob"] for each in found["top"]]
        np.testing.assert_allclose(shown, expected[order], atol=1e-5)
        np.testing.assert_allclose(found["logprob"], expected[response.token], atol=1e-5)
        assert found["text"] == f"w{response.token}"
    assert ask("--logprobs", "0")["logprobs"][0]["top"] == []
    changed = ask("--logprobs", "3", prompt=(6, *PROMPT[1:]))["logprobs"]
    assert changed[0]["logprob"] != facts[0]["logprob"]


def test_penalties_show_in_the_logprobs(ask):
    plain = ask("--logprobs", "1")["logprobs"]
    penalized = ask("--logprobs", "1", "--presence-penalty", "3")["logprobs"]
    assert plain[0]["logprob"] != penalized[0]["logprob"]


def test_an_extra_end_token(ask, llama):
    tokens = tokens_of(llama)
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    for name in (f"w{end}", str(end)):
        facts = ask("--extra-eos-token", "w3", "--extra-eos-token", name)
        assert facts["finish_reason"] == "stop"
        assert facts["token_ids"] == tokens[: tokens.index(end) + 1]


@pytest.mark.parametrize("name", ["nope", "96", "²"])
def test_an_end_token_that_is_none(run, llama, name):
    result = run("generate", "w5", "--model", llama, "--extra-eos-token", name)
    assert result.exit_code == 2
    assert result.stderr == f"error: --extra-eos-token {name!r} is no token of this model\n"


def test_the_prompt_by_any_way(run, llama, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(words(*PROMPT) + "\n")
    base = ("generate", "--model", llama, "--max-tokens", COUNT)
    expected = run(*base, words(*PROMPT)).stdout
    assert expected
    assert run(*base, "--prompt", words(*PROMPT)).stdout == expected
    assert run(*base, "-p", "-", stdin=words(*PROMPT)).stdout == expected
    assert run(*base, "--file", file).stdout == expected
    assert run(*base, "-f", "-", stdin=words(*PROMPT) + "\r\n").stdout == expected
    assert run(*base, words(*PROMPT[1:])).stdout != expected


def test_mlx_lms_names_are_ours(ask, tmp_path):
    directory = write_chat_model(tmp_path)
    ours = ("--system", "w7", "--capacity", "99", "--prefill-step", "5")
    theirs = ("--system-prompt", "w7", "--max-kv-size", "99", "--prefill-step-size", "5")
    one, other = ask(*ours, model=directory), ask(*theirs, model=directory)
    for facts in (one, other):
        facts.pop("memory")
        seconds = facts.pop("speed")
        assert seconds["prefill_step"] == 5
    assert one == other
    assert one["cache"]["capacity"] == 99
    assert one["token_ids"] != ask("--ignore-chat-template", model=directory)["token_ids"]
    raw = ask("--raw", model=directory)
    assert raw["token_ids"] == ask("--ignore-chat-template", model=directory)["token_ids"]


def test_quiet_shows_the_answer_alone(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT)
    loud = run(*base)
    for name in ("--quiet", "-q"):
        quiet = run(*base, name)
        assert (quiet.exit_code, quiet.stderr, quiet.stdout) == (0, "", loud.stdout)
    assert loud.stderr


def write_adapter(directory, path):
    """An adapter with random weights, as mlx-lm's training saves it."""
    model, _ = mlx_lm.load(str(directory))
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    linear_to_lora_layers(model, 4, parameters)
    random = np.random.default_rng(0)
    weights = {
        name: mx.array(random.normal(size=value.shape).astype(np.float32))
        for name, value in tree_flatten(model.trainable_parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_an_adapter(ask, llama, tmp_path):
    path = write_adapter(llama, tmp_path / "adapter")
    model, tokenizer = mlx_lm.load(str(llama), adapter_path=str(path))
    responses = stream_generate(model, tokenizer, list(PROMPT), max_tokens=COUNT)
    adapted = ask("--adapter-path", path)["token_ids"]
    assert adapted == [each.token for each in responses]
    assert adapted != ask()["token_ids"]


def test_code_of_the_model_is_run_only_when_it_is_trusted(ask, monkeypatch):
    trusted = []

    def noted(*arguments, trust_remote_code, **options):
        trusted.append(trust_remote_code)
        return load(*arguments, trust_remote_code=trust_remote_code, **options)

    monkeypatch.setattr("mlx_kvcache.models.load", noted)
    ask()
    ask("--trust-remote-code")
    assert trusted == [False, True]


#: Writes its argument `word` before each answer.
TEMPLATE = (
    "{% for message in messages %}w94 {{ message.content }} w95 {% endfor %}"
    "{% if add_generation_prompt %}{{ word or 'w93' }} {% endif %}"
)


def test_the_template_gets_its_arguments_and_the_answer_its_beginning(ask, tmp_path):
    directory = write_chat_model(tmp_path, template=TEMPLATE)
    plain = ask(model=directory)
    told = ask("--chat-template-args", '{"word": "w50", "unused": [1]}', model=directory)
    assert told["prompt_tokens"] == plain["prompt_tokens"]
    begun = ask("--prefill-response", "w33 w34", model=directory)
    assert begun["prompt_tokens"] == plain["prompt_tokens"] + 2
    bare = ask("--raw", model=directory)["prompt_tokens"] - len(PROMPT)
    start = [1] * bare + [94, *PROMPT, 95]
    for facts, end in ((plain, [93]), (told, [50]), (begun, [93, 33, 34])):
        assert facts["token_ids"] == tokens_of(directory, [*start, *end])
    assert len({tuple(facts["token_ids"]) for facts in (plain, told, begun)}) == 3
    # What the answer begins with was given, not made.
    assert not begun["text"].startswith("w33 w34")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--top-k", "-1"), "--top-k must be an integer from 0"),
        (("--min-p", "1.5"), "--min-p must be between 0 and 1, got 1.5"),
        (("--min-tokens-to-keep", "0"), "--min-tokens-to-keep must be an integer from 1"),
        (("--xtc-probability", "2"), "--xtc-probability must be between 0 and 1"),
        (("--xtc-threshold", "0.6"), "--xtc-threshold must be between 0 and 0.5"),
        (("--repetition-penalty", "-1"), "--repetition-penalty must be a positive number"),
        (("--repetition-context-size", "-1"), "--repetition-context-size must be an integer"),
        (("--presence-penalty", "nan"), "--presence-penalty must be a number from -1e+30"),
        (("--frequency-penalty", "inf"), "--frequency-penalty must be a number from -1e+30"),
        (("--stop", ""), "--stop is empty"),
        (("--stop", "\udcff"), "--stop is not valid UTF-8"),
        (("--extra-eos-token", ""), "--extra-eos-token is empty"),
        (("--adapter-path", "./nowhere"), "--adapter-path ./nowhere is no directory"),
        (("--chat-template-args", "{"), "--chat-template-args is not valid JSON"),
        (("--chat-template-args", "[" * 9999), "--chat-template-args is not valid JSON"),
        (("--chat-template-args", "[1]"), "--chat-template-args must be a JSON object"),
        (("--chat-template-config", '{"tokenize": 1}'), "'tokenize' is not an argument to give"),
        (("--raw", "--chat-template-args", "{}"), "--chat-template-args needs the chat template"),
        (("--raw", "--prefill-response", "x"), "--prefill-response needs the chat template"),
        (("--system", "\udcff"), "--system is not valid UTF-8"),
        (("--model", "\udcff"), "--model is not valid UTF-8"),
        (("--logprobs", "2"), "--logprobs are part of --json"),
        (("--json", "--logprobs", "101"), "--logprobs must be between 0 and 100, got 101"),
        (("--json", "--logprobs", "-1"), "--logprobs must be between 0 and 100, got -1"),
        (("--prompt", "w6"), "the prompt is given by PROMPT and --prompt; leave one of them out"),
        (("--file", "x", "-p", "w6"), "given by PROMPT and --prompt and --file"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_looked_for(run, monkeypatch, arguments, said):
    def looked(*_arguments, **_options):
        raise AssertionError("a model was looked for")

    monkeypatch.setattr("mlx_kvcache.models.resolve", looked)
    result = run("generate", "w5", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.txt", "there is no file"),
        (".", "is a directory; give a file"),
        ("bytes", "bytes is not valid UTF-8"),
        ("empty", "the prompt is empty"),
        ("a\0b", "is no name of a file"),
        ("empty/x", "there is no file"),
        ("x" * 300, "there is no file"),
    ],
)
def test_a_prompt_file_that_is_none(run, llama, tmp_path, name, said):
    (tmp_path / "bytes").write_bytes(b"w5 \xff")
    (tmp_path / "empty").write_text(" \n")
    result = run("generate", "--model", llama, "--file", f"{tmp_path}/{name}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--stop|7",
        "--prefill-response|w33 w34",
        '--chat-template-args|{"word": "w50"}',
        "--presence-penalty|2",
        "--temp|1.3|--seed|3|--top-k|5",
        "--extra-eos-token|w13",
    ],
)
def test_chat_and_batch_answer_as_generate(run, tmp_path, flags):
    directory = write_chat_model(tmp_path, template=TEMPLATE)
    base = ("--model", directory, "--max-tokens", COUNT)
    choices = flags.split("|")
    alone = run("generate", words(*PROMPT), *base, *choices)
    chat = run("chat", *base, *choices, stdin=words(*PROMPT) + "\n")
    assert (alone.exit_code, chat.exit_code) == (0, 0), chat.stderr
    # In a chat, what an answer begins with is part of what is said.
    begun = "w33 w34 " if "--prefill-response" in choices else ""
    assert chat.stdout == begun + alone.stdout
    facts = json.loads(run("generate", words(*PROMPT), *base, *choices, "--json").stdout)
    batch = run("batch", *base, *choices, stdin=words(*PROMPT) + "\n")
    assert batch.exit_code == 0, batch.stderr
    for name in ("text", "token_ids", "finish_reason"):
        assert json.loads(batch.stdout)[name] == facts[name]
    assert alone.stdout != run("generate", words(*PROMPT), *base).stdout
