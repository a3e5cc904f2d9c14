"""tokens_per_second.py runs on a tiny model, and what it counts (bytes, tokens) is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from context_sweep import app as sweep
from generation import Side, decode_steps, generate, random_prompt
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import RotatingKVCache
from model_caches import (
    Makers,
    NarrowedRotatingKVCache,
    bytes_seen,
    held,
    weight_bytes_read,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokens_per_second import app
from transformers import PreTrainedTokenizerFast

from tests.support.command_lines import run_app

pytestmark = pytest.mark.slow

VOCABULARY = 40
WINDOW = 16
CONFIG = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "rms_norm_eps": 1e-6,
}
#: Bytes of one position in one layer: 2 KV heads, keys and values of 8, float32.
ROW = 2 * 2 * 8 * 4


@pytest.fixture(scope="module")
def model() -> Any:
    """Two ring layers and a flat one; random weights in which attention matters."""
    mx.random.seed(3)
    made = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(CONFIG))
    made.load_weights(
        [(path, 0.4 * mx.random.normal(value.shape)) for path, value in _parameters(made)]
    )
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and a tokenizer, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 1}))
    mx.save_safetensors(str(path / "model.safetensors"), dict(_parameters(model)))
    words = {"<pad>": 0, "<eos>": 1, **{f"word{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[return-value]


def prompt(count: int) -> list[int]:
    return [(7 * i + i * i) % (VOCABULARY - 2) + 2 for i in range(count)]


def test_a_run_on_a_tiny_model_shows_and_writes_everything(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, shown = run_app(
        app, "--model", str(directory), "--prompt-tokens", "21", "--tokens", "9", "--repeats", "3",
        "--prefill-step", "8", "--markdown", "--json", str(file),
    )  # fmt: skip
    assert code == 0, shown
    written = json.loads(file.read_text())
    results = written["results"]
    assert written["machine"]["cpu"] in shown
    assert shown.startswith(f"**{written['machine']['warning']}**") or written["machine"]["metal"]
    assert results["identical_tokens"] is True
    assert "all 9 identical" in shown
    assert len(results["tokens"][0]) == 9
    assert results["tokens"][0] == results["tokens"][1]
    assert results["decode tokens/s"]["paired_ratio"]["count"] == 3
    assert results["host µs a decoded token"]["mlx-lm"]["count"] == 9
    assert results["decode noise"]["count"] == 4
    used = results["memory"]["KV bytes used"]
    # 21 + 9 positions in the flat layer and in our rings of 16 + 63 slots; 16 in mlx-lm's.
    assert used == {"mlx_kvcache": 3 * 30 * ROW, "mlx-lm": (30 + 2 * WINDOW) * ROW}
    achieved = results["achieved_gb_per_s"]
    assert achieved["kv_bytes_a_token"] == (25 + 2 * WINDOW) * ROW
    rate = results["decode tokens/s"]["mlx-lm"]["median"]
    read = achieved["weight_bytes_a_token"] + achieved["kv_bytes_a_token"]
    assert achieved["mlx-lm"]["median"] == pytest.approx(rate * read / 1e9)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_sweep_over_contexts(directory: Path, tmp_path: Path, compiles: bool) -> None:
    file, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    code, shown = run_app(
        sweep, "--model", str(directory), "--context", "30", "--context", "12", "--tokens", "5",
        "--prefill-step", "8", "--markdown", "--json", str(file), "--plot", str(picture),
        "--compile" if compiles else "--no-compile",
    )  # fmt: skip
    assert code == 0, shown
    results = json.loads(file.read_text())["results"]
    assert list(results) == ["12", "30"]
    for figures in results.values():
        assert figures["host_us"]["mlx-lm"]["count"] == 5
        assert figures["tokens_per_second"]["paired_ratio"]["count"] == 5
        assert f"{figures['tokens_per_second']['paired_ratio']['median']:.3f}" in shown
    assert ">30<" in picture.read_text()


def test_another_seed_gives_another_prompt_and_answer(directory: Path, tmp_path: Path) -> None:
    answers = []
    for seed in ("0", "0", "1"):
        file = tmp_path / "out.json"
        code, shown = run_app(
            app, "--model", str(directory), "--prompt-tokens", "6", "--tokens", "8",
            "--repeats", "1", "--seed", seed, "--json", str(file),
        )  # fmt: skip
        assert code == 0, shown
        answers.append(json.loads(file.read_text())["results"]["tokens"])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "4,4"], "2 windows were given for 3 cache layers"),
        (["--windows", "small"], "--windows takes integers"),
        (["--capacity", "10"], "the capacity is 10"),
        (["--json", "no/such/directory/out.json"], "no directory"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(
    directory: Path, options: list[str], message: str
) -> None:
    code, shown = run_app(
        app, "--model", str(directory), "--prompt-tokens", "12", "--tokens", "4", *options
    )
    assert code == 2
    assert message in shown
    assert "Speed" not in shown


def test_a_model_that_is_not_there_is_a_usage_error() -> None:
    code, shown = run_app(app, "--model", "/no/such/model")
    assert code == 2
    assert "/no/such/model" in shown


@pytest.mark.parametrize("windows", [None, [4], [4, 4, 0], [0]])
@pytest.mark.parametrize("chunk", [5, 64])
def test_both_caches_answer_alike_under_the_same_windows(
    model: Any, windows: list[int] | None, chunk: int
) -> None:
    makers = Makers(model, windows)
    ours = generate(Side(model, makers.ours), prompt(30), 12, chunk)
    theirs = generate(Side(model, makers.theirs), prompt(30), 12, chunk)
    assert ours.tokens == theirs.tokens
    assert len(ours.tokens) == 12


def test_the_windows_matter_to_either_cache(model: Any) -> None:
    for make in ("ours", "theirs"):
        answers = {
            generate(Side(model, getattr(Makers(model, windows), make)), prompt(30), 12, 64).tokens
            for windows in ([2], [0])
        }
        assert len(answers) == 2


def test_a_narrowed_rotating_cache_masks_by_its_own_window() -> None:
    narrowed, plain = NarrowedRotatingKVCache(4), RotatingKVCache(4)
    mask = narrowed.make_mask(9, window_size=16)
    assert isinstance(mask, mx.array)
    rows = mx.arange(9)
    expected = (rows[None] <= rows[:, None]) & (rows[None] > rows[:, None] - 4)
    assert mx.array_equal(mask, expected)
    assert isinstance(plain.make_mask(9, window_size=16), str)


def test_bytes_held_are_those_of_the_rows(model: Any) -> None:
    makers = Makers(model, initial_capacity=32)
    ours = generate(Side(model, makers.ours), prompt(20), 5, 64)
    # 25 positions held; 32 rows in the flat layer, 16 + 63 slots in the rings.
    assert ours.held.used == 3 * 25 * ROW
    assert ours.held.allocated == (32 + 2 * (WINDOW + 63)) * ROW
    theirs = generate(Side(model, makers.theirs), prompt(20), 5, 64)
    assert theirs.held.used == (25 + 2 * WINDOW) * ROW
    assert theirs.held.allocated == (256 + 2 * WINDOW) * ROW
    longer = generate(Side(model, makers.ours), prompt(20), 6, 64)
    assert longer.held.used == 3 * 26 * ROW
    assert ours.peak > weight_bytes_read(model)
    assert held(makers.theirs()).used == 0


def test_bytes_seen_stop_at_the_window(model: Any) -> None:
    cache = Makers(model).ours()
    generate(Side(model, lambda: cache), prompt(4), 2, 64)
    assert bytes_seen(cache, 10) == 3 * 10 * ROW
    assert bytes_seen(cache, 100) == (100 + 2 * WINDOW) * ROW


def test_a_table_that_is_only_looked_up_is_not_read() -> None:
    class Parameters:
        def __init__(self, **tables: int) -> None:
            self.tables = {name: {"weight": mx.zeros((rows,))} for name, rows in tables.items()}

        def parameters(self) -> dict[str, Any]:
            return self.tables

    assert weight_bytes_read(Parameters(embed_tokens=100, other=1)) == 404
    assert weight_bytes_read(Parameters(embed_tokens=100, other=1, lm_head=100)) == 404
    assert weight_bytes_read(Parameters(embed_tokens=100, other=1, lm_head=50)) == 204
    assert weight_bytes_read(Parameters(other=1, switch_mlp=9)) is None


def test_a_random_prompt_has_no_special_tokens() -> None:
    class Words:
        vocab_size = 6
        all_special_ids = (0, 3)

    drawn = random_prompt(Words(), 200, seed=1)
    assert set(drawn) == {1, 2, 4, 5}
    assert drawn == random_prompt(Words(), 200, seed=1)
    assert drawn != random_prompt(Words(), 200, seed=2)


def test_decode_steps_of_both_caches_are_timed_in_equal_number(model: Any) -> None:
    makers = Makers(model)
    times = decode_steps((Side(model, makers.ours), Side(model, makers.theirs)), prompt(20), 7, 6)
    assert [len(side) for side in times] == [7, 7]
    assert all(0 < built < took for side in times for built, took in side)
