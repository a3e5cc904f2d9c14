"""`generate`: the same tokens as mlx-lm on its own caches, and what is said about them."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_kvcache.chat.generation import Generation
from mlx_kvcache.models import load, resolve
from tests.support import tiny_tokenizers
from tests.support.tiny_models_on_disk import words, write_model

PROMPT = (5, 17, 40, 33, 8, 61, 22, 9, 90, 13, 77, 4)
COUNT = 24


def reference(directory, prompt, count, cache=None, seed=0, **options):
    """Text and tokens of mlx-lm alone."""
    model, tokenizer = mlx_lm.load(str(directory))
    # Building the model has used random numbers.
    mx.random.seed(seed)
    responses = stream_generate(
        model, tokenizer, list(prompt), max_tokens=count, prompt_cache=cache, **options
    )
    responses = list(responses)
    return "".join(response.text for response in responses), [each.token for each in responses]


def answer(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_text_is_mlx_lms_and_nothing_else_is_on_stdout(run, llama):
    text, _ = reference(llama, PROMPT, COUNT)
    result = run("generate", words(*PROMPT), "--model", llama, "--max-tokens", str(COUNT))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == text + "\n"
    other = run("generate", words(6, *PROMPT[1:]), "--model", llama, "--max-tokens", str(COUNT))
    assert other.exit_code == 0
    assert other.stdout != result.stdout


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_other_families_give_mlx_lms_tokens(run, tmp_path, family):
    directory = write_model(tmp_path, family)
    _, tokens = reference(directory, PROMPT, COUNT)
    facts = answer(
        run("generate", words(*PROMPT), "--model", directory, "--max-tokens", COUNT, "--json")
    )
    assert facts["token_ids"] == tokens
    recurrent = facts["cache"]["geometry"]["recurrent_layers"]
    assert recurrent == (2 if family == "qwen3_next" else 0)


@pytest.mark.parametrize("step", [1, 5, 2048])
def test_prefill_in_any_chunks(run, llama, step):
    _, tokens = reference(llama, PROMPT, COUNT)
    arguments = ("--max-tokens", COUNT, "--prefill-step", step, "--json")
    facts = answer(run("generate", words(*PROMPT), "--model", llama, *arguments))
    assert facts["token_ids"] == tokens
    assert facts["speed"]["prefill_step"] == step


def test_windows_make_layers_slide_that_do_not(run, flat_llama):
    rotating = [RotatingKVCache(6) for _ in range(4)]
    _, narrow = reference(flat_llama, PROMPT, COUNT, rotating)
    _, wide = reference(flat_llama, PROMPT, COUNT)
    assert narrow != wide
    base = ("generate", words(*PROMPT), "--model", flat_llama, "--max-tokens", COUNT, "--json")
    facts = answer(run(*base, "--windows", "6,6,6,6"))
    assert facts["token_ids"] == narrow
    assert facts["cache"]["geometry"]["windows"] == [6, 6, 6, 6]
    assert answer(run(*base))["token_ids"] == wide
    refused = run(*base, "--windows", "6")
    assert refused.exit_code == 2
    assert "a single window is for the sliding-window layers" in refused.stderr


def test_window_zero_keeps_everything(run, llama):
    _, sliding = reference(llama, PROMPT, COUNT)
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT, "--json")
    facts = answer(run(*base, "--windows", "0"))
    assert facts["cache"]["geometry"]["windows"] == [0, 0, 0, 0]
    assert facts["token_ids"] != sliding
    # So wide a window hides nothing either.
    assert facts["token_ids"] == answer(run(*base, "--windows", "500"))["token_ids"]
    assert answer(run(*base))["cache"]["geometry"]["windows"] != [0, 0, 0, 0]


def test_kv_dtype_is_the_storage_dtype(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT, "--json")
    wide = answer(run(*base, "--kv-dtype", "float32"))["cache"]
    narrow = answer(run(*base, "--kv-dtype", "bfloat16"))["cache"]
    assert wide["bytes_held"] == 2 * narrow["bytes_held"]
    assert wide["bytes_used"] == 2 * narrow["bytes_used"]
    assert narrow["kv_dtype"] == "bfloat16"


def test_dtype_of_the_weights_decides_the_caches(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", "2", "--json")
    wide = answer(run(*base, "--dtype", "float32"))["cache"]
    narrow = answer(run(*base, "--dtype", "bfloat16"))["cache"]
    assert wide["bytes_held"] == 2 * narrow["bytes_held"]


def test_initial_capacity_and_reservation(run, flat_llama):
    bytes_per_row = 4 * 2 * (16 + 16) * 4

    def rows(*arguments):
        base = ("generate", words(*PROMPT), "--model", flat_llama, "--json")
        held = answer(run(*base, *arguments))["cache"]["bytes_held"]
        assert held % bytes_per_row == 0
        return held // bytes_per_row

    # An explicit start doubles; the reservation would have stopped at 20 rows.
    assert rows("--max-tokens", "8", "--initial-capacity", "3") == 24
    assert rows("--max-tokens", "8", "--initial-capacity", "0") == 32
    assert rows("--max-tokens", "8") == 512
    assert rows("--max-tokens", "8", "--capacity", "100") == 100


@pytest.mark.slow
def test_a_long_prompt_is_reserved_at_once_with_its_answer(run, flat_llama):
    bytes_per_row = 4 * 2 * (16 + 16) * 4
    prompt = words(*(3 + number % 90 for number in range(600)))
    base = ("generate", prompt, "--model", flat_llama, "--capacity", "2000", "--json")
    short = answer(run(*base, "--max-tokens", "5"))["cache"]
    assert short["bytes_held"] == 605 * bytes_per_row
    assert short["length"] == 605
    long = answer(run(*base, "--max-tokens", "601", "--temp", "1", "--seed", "1"))["cache"]
    assert long["bytes_held"] in (1024 * bytes_per_row, 2000 * bytes_per_row)


def test_spare_is_the_spare_rows_of_the_rings(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", "8", "--json")
    row = 2 * (16 + 16) * 4
    one = answer(run(*base, "--spare", "1"))["cache"]
    five = answer(run(*base, "--spare", "5"))["cache"]
    rings = sum(1 for window in one["geometry"]["windows"] if window)
    assert rings > 0
    assert five["bytes_held"] - one["bytes_held"] == rings * 4 * row


def test_seed_repeats_a_random_answer(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT, "--json")
    sampled = ("--temp", "1.5", "--top-p", "0.95")
    first = answer(run(*base, *sampled, "--seed", "7"))["token_ids"]
    again = answer(run(*base, *sampled, "--seed", "7"))["token_ids"]
    other = answer(run(*base, *sampled, "--seed", "8"))["token_ids"]
    assert first == again
    assert first != other
    _, tokens = reference(llama, PROMPT, COUNT, seed=7, sampler=make_sampler(1.5, 0.95))
    assert first == tokens


def test_a_small_top_p_is_greedy(run, llama):
    _, greedy = reference(llama, PROMPT, COUNT)
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT, "--json")
    facts = answer(run(*base, "--temp", "5", "--top-p", "1e-6", "--seed", "3"))
    assert facts["token_ids"] == greedy
    assert answer(run(*base, "--temp", "5", "--seed", "3"))["token_ids"] != greedy


def test_chat_template_unless_raw(run, chatty):
    base = ("--model", chatty, "--max-tokens", "6", "--json")
    facts = answer(run("generate", words(5, 6), *base))
    assert facts["prompt_tokens"] == 4
    _, templated = reference(chatty, (90, 5, 6, 92), 6)
    assert facts["token_ids"] == templated
    raw = answer(run("generate", words(5, 6), *base, "--raw"))
    assert raw["prompt_tokens"] == 2
    _, plain = reference(chatty, (5, 6), 6)
    assert raw["token_ids"] == plain
    system = answer(run("generate", words(5, 6), *base, "--system", "w7"))
    _, with_system = reference(chatty, (91, 7, 90, 5, 6, 92), 6)
    assert system["token_ids"] == with_system
    assert len({tuple(each["token_ids"]) for each in (facts, raw, system)}) == 3


def test_prompt_from_standard_input(run, llama):
    base = ("--model", llama, "--max-tokens", "8", "--json")
    given = answer(run("generate", words(*PROMPT), *base))["token_ids"]
    dash = answer(run("generate", "-", *base, stdin=words(*PROMPT) + "\n"))
    piped = answer(run("generate", *base, stdin=words(*PROMPT)))
    assert dash["token_ids"] == piped["token_ids"] == given
    assert dash["prompt_tokens"] == len(PROMPT)
    other = answer(run("generate", "-", *base, stdin=words(*PROMPT[1:])))
    assert other["token_ids"] != given


def test_json_schema(run, llama):
    facts = answer(
        run("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT, "--json")
    )
    text, tokens = reference(llama, PROMPT, COUNT)
    assert (facts["text"], facts["token_ids"]) == (text, tokens)
    assert facts["model"] == str(llama)
    assert facts["finish_reason"] == "length"
    assert facts["prompt_tokens"] == len(PROMPT)
    assert facts["generated_tokens"] == COUNT
    assert facts["sampling"] == {"max_tokens": COUNT, "temp": 0.0, "top_p": 1.0, "seed": None}
    speed = facts["speed"]
    assert 0 < speed["first_token_seconds"] < speed["total_seconds"]
    assert speed["prefill_tokens_per_second"] == len(PROMPT) / speed["first_token_seconds"]
    decode = speed["total_seconds"] - speed["first_token_seconds"]
    assert speed["decode_tokens_per_second"] == (COUNT - 1) / decode
    cache = facts["cache"]
    assert cache["length"] == len(PROMPT) + COUNT
    assert cache["capacity"] == 512
    assert 0 < cache["bytes_used"] < cache["bytes_held"]
    geometry = cache["geometry"]
    assert geometry["summary"] == "2 flat + 2 ring(8)"
    assert sorted(geometry["windows"]) == [0, 0, 8, 8]
    assert {layer["count"] for layer in geometry["layers"]} == {2}
    memory = facts["memory"]
    assert 0 < memory["mlx_active_bytes"] <= memory["mlx_peak_bytes"]
    assert memory["mlx_active_bytes"] < memory["process_peak_bytes"]
    assert set(facts["versions"]) == {"mlx-kvcache", "mlx", "mlx-lm", "transformers"}
    assert facts["versions"]["mlx"] == mx.__version__


def test_figures_on_stderr(run, llama):
    result = run("generate", words(*PROMPT), "--model", llama, "--max-tokens", COUNT)
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    length = len(PROMPT) + COUNT
    assert lines[0].startswith(f"cache   2 flat + 2 ring(8) layers, {length}/512 positions, ")
    assert lines[1].startswith("memory  MLX ")
    assert lines[2].startswith(f"speed   prefill {len(PROMPT)} tokens at ")
    assert f"decode {COUNT} tokens at" in lines[2]
    assert "\x1b" not in result.stderr


def test_one_token_has_no_decode_speed(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--max-tokens", "1")
    facts = answer(run(*base, "--json"))
    assert facts["generated_tokens"] == 1
    assert facts["speed"]["decode_tokens_per_second"] is None
    assert facts["speed"]["first_token_seconds"] > 0
    assert "decode 1 tokens at - tokens/s" in run(*base).stderr


def test_an_end_token_stops_the_answer(run, llama, tmp_path):
    _, tokens = reference(llama, PROMPT, COUNT)
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    place = tokens.index(end)
    directory = write_model(tmp_path, changes={"eos_token_id": [end]})
    facts = answer(
        run("generate", words(*PROMPT), "--model", directory, "--max-tokens", COUNT, "--json")
    )
    assert facts["finish_reason"] == "stop"
    assert facts["token_ids"] == tokens[: place + 1]
    assert facts["text"].split() == [f"w{token}" for token in tokens[:place]]


#: Only an answer is ended, so the prompt does not depend on the token that does it.
ENDING = (
    "{%% for message in messages %%}{%% if message.role == 'assistant' %%}"
    "{{ message.content }} w%d {%% else %%}w90 {{ message.content }} {%% endif %%}{%% endfor %%}w92"
)


def test_the_turn_end_of_the_template_stops_all_commands(run, tmp_path, chatty):
    """A special token that the template puts after an answer, and that the config leaves out."""
    _, tokens = reference(chatty, (90, *PROMPT, 92), COUNT)
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    place = tokens.index(end)
    special = write_model(tmp_path / "special", template=ENDING % end, special=(f"w{end}",))
    plain = write_model(tmp_path / "plain", template=ENDING % end)
    base = (words(*PROMPT), "--max-tokens", COUNT, "--json", "--model")
    facts = answer(run("generate", *base, special))
    assert facts["finish_reason"] == "stop"
    assert facts["token_ids"] == tokens[: place + 1]
    assert facts["text"].split() == [f"w{token}" for token in tokens[:place]]
    piped = {"stdin": words(*PROMPT) + "\n"}
    (result,) = map(
        json.loads,
        run("batch", "-m", special, "--max-tokens", COUNT, **piped).stdout.splitlines(),
    )
    for name in ("finish_reason", "token_ids", "text"):
        assert result[name] == facts[name]
    said = run("chat", "-m", special, "--max-tokens", COUNT, **piped)
    assert said.stdout.split() == facts["text"].split()
    # Neither an ordinary token of the template nor the template left out ends an answer.
    assert answer(run("generate", *base, plain))["token_ids"] == tokens
    raw = answer(run("generate", *base, special, "--raw"))
    assert raw["token_ids"] == answer(run("generate", *base, plain, "--raw"))["token_ids"]
    assert raw["finish_reason"] == "length"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero; use --raw"),
        ("{{ messages + 1 }}", "TypeError: "),
        ("{% for", "; use --raw"),
        ("{{ messages[7].content.x }}", "has no element 7; use --raw"),
    ],
)
def test_a_template_that_fails_is_refused(run, tmp_path, template, said):
    directory = write_model(tmp_path, template=template)
    prompt = words(*PROMPT)
    for arguments, stdin in (
        (("generate", prompt), None),
        (("batch",), prompt + "\n"),
        (("chat",), prompt + "\n"),
    ):
        result = run(*arguments, "--model", directory, stdin=stdin)
        assert result.exit_code == 2, result.stderr
        assert result.stdout == ""
        assert "the model's chat template refuses this: " in result.stderr
        assert said in result.stderr
        assert "use --raw" in result.stderr
    assert run("generate", prompt, "--model", directory, "--raw").exit_code == 0


def test_times_are_wall_clock(monkeypatch):
    """A slow first token and slow later ones must show in the two speeds."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Response:
        text, token, finish_reason = "w5 ", 5, None

    def slow(*_arguments, **_options):
        now[0] += 4.0
        yield Response()
        for _ in range(10):
            now[0] += 0.5
            yield Response()

    monkeypatch.setattr(import_module("mlx_lm.generate"), "stream_generate", slow)

    tokenizer = TokenizerWrapper(tiny_tokenizers.words())
    cache = SimpleNamespace(length=0, rewind=lambda _: None)
    generation = Generation(None, tokenizer, [1] * 8, cache, 11, frozenset())
    assert generation.prefill_tokens_per_second is None
    assert len(list(generation.pieces())) == 11
    assert generation.first_token_seconds == 4.0
    assert generation.seconds == 9.0
    assert generation.prefill_tokens_per_second == 2.0
    assert generation.decode_tokens_per_second == 2.0


def test_capacity_may_be_filled_exactly(run, llama):
    base = ("generate", words(*PROMPT), "--model", llama, "--json", "--max-tokens", "5")
    facts = answer(run(*base, "--capacity", str(len(PROMPT) + 5)))
    assert facts["cache"]["length"] == facts["cache"]["capacity"] == len(PROMPT) + 5
    refused = run(*base, "--capacity", str(len(PROMPT) + 4))
    assert refused.exit_code == 2


def test_a_config_without_a_context_length_is_unlimited(run, tmp_path):
    directory = write_model(tmp_path, without="max_position_embeddings")
    base = ("generate", words(*PROMPT), "--model", directory, "--max-tokens", "5")
    assert answer(run(*base, "--json"))["cache"]["capacity"] is None
    assert "17/unlimited positions" in run(*base).stderr


def test_reference_caches_are_what_the_tests_think(llama):
    model, _ = mlx_lm.load(str(llama))
    assert {type(cache) for cache in model.make_cache()} == {KVCache, RotatingKVCache}


@pytest.mark.models
def test_the_default_model_answers(run):
    """SmolLM2 through the command line says what it says on mlx-lm's own caches."""
    directory = resolve("smollm2")
    prompt = "The capital of France is"
    model, tokenizer = load(directory)
    responses = stream_generate(model, tokenizer, prompt, max_tokens=8)
    text = tokenizer.decode([response.token for response in responses])
    result = run("generate", prompt, "--raw", "--max-tokens", "8")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.removesuffix("\n") == text.removesuffix("\n")
    assert "Paris" in text
    other = run("generate", "The capital of Italy is", "--raw", "--max-tokens", "8")
    assert "Rome" in other.stdout
    assert "30 flat layers" in other.stderr
