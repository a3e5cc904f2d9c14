"""Wrong requests: one line on stderr that says what to do, status 2, and nothing computed."""

from __future__ import annotations

import json
import socket
from importlib import import_module

import pytest
from mlx_lm.models.llama import Model

from tests.support.tiny_models_on_disk import words, write_model

PROMPT = words(5, 17, 40, 33, 8, 61)


@pytest.fixture
def calls(monkeypatch):
    """The forward passes that evaluate something: one entry each, by number of tokens.

    The pass that reads off what a model caches is never evaluated and comes with one token, 0.
    """
    counted = []
    forward = Model.__call__

    def call(self, inputs, *arguments, **options):
        counted.append(inputs.shape[1])
        return forward(self, inputs, *arguments, **options)

    monkeypatch.setattr(Model, "__call__", call)
    return counted


def refusal(result):
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "\x1b" not in lines[0]
    return lines[0]


def test_capacity_is_refused_before_any_forward_pass(run, llama, calls):
    base = ("generate", PROMPT, "--model", llama)
    line = refusal(run(*base, "--max-tokens", "20", "--capacity", "25"))
    assert line == (
        "error: 6 prompt tokens and 20 new ones (--max-tokens) need 26 positions, but the "
        "capacity is 25 (--capacity); lower --max-tokens to at most 19, or raise --capacity to 26"
    )
    assert calls == []
    assert run(*base, "--max-tokens", "19", "--capacity", "25").exit_code == 0
    assert len(calls) > 1


def test_the_models_own_context_is_the_default_capacity(run, llama, calls):
    line = refusal(run("generate", PROMPT, "--model", llama, "--max-tokens", "507"))
    assert "need 513 positions, but the capacity is 512 (the model's context length)" in line
    assert calls == []


def test_a_prompt_alone_over_capacity(run, llama, calls):
    base = ("generate", PROMPT, "--model", llama, "--max-tokens", "1", "--capacity", "6")
    assert "shorten the prompt, or raise --capacity to 7" in refusal(run(*base))
    assert calls == []


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-tokens", "0", "--max-tokens must be between 1 and"),
        ("--max-tokens", "-1", "got -1"),
        ("--max-tokens", "many", "'--max-tokens'"),
        ("--temp", "-0.1", "--temp must be 0 (greedy) or a positive number, from 1e-30 to"),
        ("--temp", "nan", "got nan"),
        ("--temp", "inf", "got inf"),
        ("--temp", "hot", "'--temp'"),
        ("--top-p", "0", "--top-p must be from 1e-30 to 1, got 0.0"),
        ("--top-p", "1.01", "got 1.01"),
        ("--top-p", "nan", "got nan"),
        ("--seed", "-1", "--seed must be an integer from 0 to"),
        ("--seed", str(2**64), "--seed must be an integer from 0 to"),
        ("--capacity", "0", "--capacity must be between 1 and"),
        ("--capacity", str(2**31), f"got {2**31}"),
        ("--kv-dtype", "int8", "--kv-dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ("--initial-capacity", "-1", "--initial-capacity must be between 0 and"),
        ("--spare", "0", "--spare must be between 1 and"),
        ("--windows", "", "--windows must be integers separated by commas"),
        ("--windows", "8,", "--windows must be integers"),
        ("--windows", "8;8", "got '8;8'"),
        ("--windows", "-1", "--windows must be between 0 and"),
        ("--windows", "8,8", "2 windows were given for 4 cache layers"),
        ("--windows", "8,0,9,0", "the model uses one mask for all of a kind"),
        ("--dtype", "float64", "--dtype must be one of float32, float16, bfloat16, got 'float64'"),
        ("--prefill-step", "0", "--prefill-step must be between 1 and"),
        ("--model", " ", "--model is empty"),
        ("--model", "no-such-model", "no model is named 'no-such-model'"),
        ("--model", "./nowhere", "there is no file or directory ./nowhere"),
        ("--nonsense", "1", "No such option: --nonsense"),
    ],
)
def test_bad_values_of_options(run, llama, calls, flag, value, said):
    line = refusal(run("generate", PROMPT, "--model", llama, flag, value))
    assert said in line
    # At most the lazy pass that reads off the geometry, to hold the windows against it.
    assert calls in ([], [1])


@pytest.mark.parametrize("prompt", ["", "  \n ", "-"])
def test_an_empty_prompt(run, llama, prompt):
    assert "the prompt is empty" in refusal(run("generate", prompt, "--model", llama, stdin="\n"))


def test_no_prompt_at_a_terminal(run, llama, monkeypatch):
    options = import_module("mlx_kvcache.commands.generate")

    class Terminal:
        def isatty(self):
            return True

    class FakeSys:
        stdin = Terminal()

    monkeypatch.setattr(options, "sys", FakeSys)
    assert "there is no prompt" in refusal(run("generate", "--model", llama))


def test_standard_input_that_is_not_utf8(run, llama):
    line = refusal(run("generate", "-", "--model", llama, stdin=b"w5 \xff"))
    assert "not valid UTF-8" in line
    assert "at byte 3" in line
    assert "not valid UTF-8" in refusal(run("generate", "w5 \udcff", "--model", llama))


def test_a_prompt_without_tokens(run, llama, monkeypatch):
    tokenizer = import_module("mlx_lm.tokenizer_utils").TokenizerWrapper
    monkeypatch.setattr(tokenizer, "encode", lambda *_a, **_k: [], raising=False)
    assert "no token of this model" in refusal(run("generate", "w5", "--model", llama))


def test_system_prompts_that_cannot_be(run, llama, chatty, calls):
    base = ("generate", "w5", "--system")
    assert "no chat template" in refusal(run(*base, "w6", "--model", llama))
    assert "--raw turns off" in refusal(run(*base, "w6", "--model", chatty, "--raw"))
    line = refusal(run(*base, "w9", "--model", chatty))
    assert "refuses this: no such system prompt; leave --system out, or use --raw" in line
    assert calls == []


def test_a_hub_id_without_network(run, monkeypatch):
    def unreachable(*_arguments, **_options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    line = refusal(run("generate", "hi", "--model", "org/model"))
    assert "'org/model'" in line
    assert "Hugging Face hub" in line
    assert "'org/model'" in refusal(run("inspect", "org/model"))


def test_a_directory_without_weights(run, tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no weights" in refusal(run("generate", "w5", "--model", tmp_path))
    assert run("inspect", tmp_path).exit_code == 0


def test_a_family_that_mlx_lm_lacks(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    refusal(run("generate", "w5", "--model", tmp_path))
    refusal(run("inspect", tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", "CONFIG", "--context", "0"), "--context must be between 1 and"),
        (("inspect", "CONFIG", "--context", "x"), "'--context'"),
        (("inspect", "CONFIG", "--kv-dtype", "int4"), "--kv-dtype must be one of"),
        (("inspect", "nowhere/config.json"), "nowhere/config.json"),
        (("inspect", "no-such-model"), "no model is named 'no-such-model'"),
        (("inspect",), "Missing argument 'MODEL_OR_CONFIG'"),
        (("no-such-command",), "No such command 'no-such-command'"),
        (("--no-such-option",), "No such option: --no-such-option"),
    ],
)
def test_bad_requests_beside_generate(run, llama, arguments, said):
    config = llama / "config.json"
    assert said in refusal(run(*(config if each == "CONFIG" else each for each in arguments)))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "llama"}', '{"model_type": "llama", "layer_types": 3}']
)
@pytest.mark.parametrize("name", ["config.json", "other.json"])
def test_inspect_of_a_malformed_config(run, tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    refusal(run("inspect", path))


def test_a_system_error_is_one_line_too(run, llama, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_kvcache.models.resolve", full)
    result = run("generate", "w5", "--model", llama)
    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device\n"


def test_a_config_that_transformers_refuses(run, tmp_path):
    directory = write_model(tmp_path / "odd", changes={"max_position_embeddings": "many"})
    line = refusal(run("generate", PROMPT, "--model", directory))
    assert "max_position_embeddings" in line
