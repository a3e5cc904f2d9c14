"""The hand-written decoder in examples/ against mlx-lm's own models with mlx-lm's own caches."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from mlx_kvcache import CacheConfig, CacheSession, MLXSequenceCache
from mlx_kvcache.errors import NoActiveCacheError, UnsupportedModelError
from mlx_kvcache.models import load, read_config
from tests.support.tiny_models import all_families, build, logits_in_chunks, random_tokens
from tests.support.tiny_models_on_disk import words, write_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "decoder.py"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def decoder_module() -> ModuleType:
    """examples/decoder.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("example_decoder", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_knows_no_cache_but_through_the_op() -> None:
    source = EXAMPLE.read_text()
    assert "mlx_lm" not in source
    for name in ("update_and_fetch", "make_mask", "keys_and_values", "scaled_dot_product"):
        assert name not in source


CONFIGS: dict[str, dict[str, Any]] = {
    "llama, llama3 rope": {},
    "llama, plain rope and untied": {"rope_scaling": None, "tie_word_embeddings": False},
    "llama, linear rope and biases": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "gemma3_text": {},
    "gemma3_text, linear rope": {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 32,
    },
}


def tiny(name: str) -> tuple[Any, dict[str, Any]]:
    family = name.split(",")[0]
    config = {**all_families()[family], **CONFIGS[name]}
    return build(family, config), config


def weights_of(model: Any) -> dict[str, mx.array]:
    """The weights as a Hugging Face directory has them: without a head that is tied."""
    weights = dict(tree_flatten(model.parameters()))
    if model.model_type == "gemma3_text":
        # mlx-lm drops the head of a tied model only when it loads weights without one.
        weights.pop("lm_head.weight")
        model.tie_word_embeddings = True
    return weights


def decode(
    decoder: Any, tokens: Sequence[int], chunks: Sequence[int], cache: MLXSequenceCache | None
) -> np.ndarray:
    position, pieces = 0, []
    for size in chunks:
        step = mx.array([list(tokens[position : position + size])])
        pieces.append(decoder.logits(decoder(step, position, cache)))
        position += size
    assert position == len(tokens)
    return np.array(mx.concatenate(pieces, axis=1))


@pytest.mark.parametrize("chunks", [[30], [7, 1, 12, 1, 1, 8], [1] * 30], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_models_give_mlx_lms_logits(
    decoder_module: ModuleType, name: str, chunks: list[int]
) -> None:
    model, config = tiny(name)
    decoder = decoder_module.Decoder(config, weights_of(model))
    cache = MLXSequenceCache(decoder.geometry, CacheConfig(spare=4, initial_capacity=2))
    tokens = random_tokens(config, 30)
    reference = np.array(logits_in_chunks(model, tokens, make_mlx_lm_cache(model), [30]))
    got = decode(decoder, tokens, chunks, cache)
    scale = np.abs(reference).max()
    assert np.abs(got - reference).max() < CLOSE * max(1, scale)
    rings = [layout.size for layout in cache.layout.layers if hasattr(layout, "size")]
    assert rings
    assert max(rings) < 30, "no ring wrapped"

    changed = [*tokens[:15], (tokens[15] + 1) % 96, *tokens[16:]]
    cache.clear()
    other = decode(decoder, changed, chunks, cache)
    assert np.abs(other[:, :15] - reference[:, :15]).max() < CLOSE * max(1, scale)
    assert np.abs(other[:, -1] - reference[:, -1]).max() > 100 * CLOSE


def test_the_geometry_of_the_cache_may_narrow_the_windows(decoder_module: ModuleType) -> None:
    model, config = tiny("gemma3_text")
    decoder = decoder_module.Decoder(config, weights_of(model))
    tokens = random_tokens(config, 20)
    own = decode(decoder, tokens, [20], MLXSequenceCache(decoder.geometry))
    narrow = decoder.geometry.with_windows(
        [3 if window else 0 for window in decoder.geometry.windows]
    )
    got = decode(decoder, tokens, [9, 11], MLXSequenceCache(narrow))
    assert np.abs(got[:, :3] - own[:, :3]).max() < 10 * CLOSE
    assert np.abs(got - own).max() > 0.1
    model.args.sliding_window = model.model.window_size = 3
    reference = np.array(logits_in_chunks(model, tokens, make_mlx_lm_cache(model), [20]))
    assert np.abs(got - reference).max() < CLOSE * max(1, np.abs(reference).max())


def test_two_sequences_that_advance_together(decoder_module: ModuleType) -> None:
    model, config = tiny("llama, llama3 rope")
    decoder = decoder_module.Decoder(config, weights_of(model))
    pair = mx.array([random_tokens(config, 14, 1), random_tokens(config, 14, 2)])
    both = MLXSequenceCache(decoder.geometry)
    together = [decoder(pair[:, :10], 0, both), decoder(pair[:, 10:], 10, both)]
    for row in (0, 1):
        alone = MLXSequenceCache(decoder.geometry)
        single = decoder(pair[row : row + 1], 0, alone)
        joined = mx.concatenate(together, axis=1)[row : row + 1]
        assert np.allclose(np.array(joined), np.array(single), atol=CLOSE)


def test_generation_goes_to_the_active_cache(decoder_module: ModuleType) -> None:
    model, config = tiny("llama, plain rope and untied")
    decoder = decoder_module.Decoder(config, weights_of(model))
    prompt = random_tokens(config, 12)
    with pytest.raises(NoActiveCacheError):
        list(decoder_module.generate(decoder, prompt, 4))
    explicit = MLXSequenceCache(decoder.geometry)
    expected = list(decoder_module.generate(decoder, prompt, 8, chunk=5, cache=explicit))
    with CacheSession(decoder.geometry) as session:
        assert list(decoder_module.generate(decoder, prompt, 8, chunk=5)) == expected
        # The last token was not read any more.
        assert session.control.length == len(prompt) + 7
        session.control.rewind(0)
        ends = decoder_module.generate(decoder, prompt, 8, ends=[expected[2]])
        assert list(ends) == expected[: expected.index(expected[2]) + 1]
    reference = generate_step(mx.array(prompt), model, max_tokens=8)
    assert [int(token) for token, _ in reference] == expected


@pytest.mark.parametrize("name", ["llama, plain rope and untied", "gemma3_text"])
def test_every_kind_of_cache_serves_it_through_the_same_op(
    decoder_module: ModuleType, name: str
) -> None:
    model, config = tiny(name)
    decoder = decoder_module.Decoder(config, weights_of(model))
    windows = decoder.geometry.windows
    prompt = random_tokens(config, 40)
    expected = list(
        decoder_module.generate(decoder, prompt, 12, cache=MLXSequenceCache(decoder.geometry))
    )
    other = [*prompt[:-1], prompt[-1] + 1]
    for kind in decoder_module.KINDS:
        config = CacheConfig(100, initial_capacity=4, spare=3)
        with CacheSession(decoder.geometry, config, kind=kind) as session:
            got = list(decoder_module.generate(decoder, prompt, 12, chunk=7))
            cache = session.cache
            held = cache.length if kind == "sequence" else cache.position(0)
            assert held == len(prompt) + 11 > max(windows) + 3
        assert got == expected, kind
        with CacheSession(decoder.geometry, config, kind=kind):
            assert list(decoder_module.generate(decoder, other, 12, chunk=7)) != expected
    assert "gemma" not in name or any(windows)


def test_models_that_it_cannot_run(decoder_module: ModuleType) -> None:
    with pytest.raises(UnsupportedModelError, match="'qwen3'"):
        decoder_module.Decoder(all_families()["qwen3"], {})
    config = {**all_families()["llama"], "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        decoder_module.Decoder(config, {})


def test_the_command_line(
    decoder_module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "tiny")
    arguments = ["--model", str(directory), "--prompt", words(5, 9, 33), "--max-tokens", "6"]
    assert decoder_module.main(arguments) == 0
    shown = capsys.readouterr().out.split()
    model, tokenizer = load(directory)
    prompt = tokenizer.encode(words(5, 9, 33))
    tokens = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=6)]
    assert shown == tokenizer.decode(tokens, skip_special_tokens=True).split()
    for kind in decoder_module.KINDS:
        assert decoder_module.main([*arguments, "--kind", kind]) == 0
        assert capsys.readouterr().out.split() == shown
    assert decoder_module.main([*arguments, "--prompt", words(6, 9, 33)]) == 0
    assert capsys.readouterr().out.split() != shown
    for wrong in (["--max-tokens", "0"], ["--model", "no-such-model"], ["--prompt", ""]):
        with pytest.raises(SystemExit) as ended:
            decoder_module.main([*arguments, *wrong])
        assert ended.value.code == 2


TEXT = (
    "The old lighthouse keeper wrote in his journal every evening. On Monday he noted the wind, on "
    "Tuesday a ship from Lisbon, on Wednesday nothing at all, and on Thursday he found a bottle on "
    "the beach. In the bottle was a letter, written in a hand he did not know, and it began"
)
NEW_TOKENS = 32
NARROW = 24


def mlx_lms_tokens(model: Any, prompt: list[int], cache: list[Any]) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=NEW_TOKENS, prompt_cache=cache)
    return [int(token) for token, _ in steps]


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def real(request: pytest.FixtureRequest, decoder_module: ModuleType) -> tuple[Any, Any, list[int]]:
    """mlx-lm's model, the hand-written one, and a prompt, of one of the demos."""
    model, tokenizer = load(request.param, dtype="float32")
    decoder, directory = decoder_module.load(request.param, mx.float32)
    assert decoder.facts == decoder_module.Facts.from_config(read_config(directory))
    prompt = tokenizer.encode(TEXT)
    assert 55 <= len(prompt) <= 70
    return model, decoder, prompt


@pytest.mark.models
def test_real_models_give_mlx_lms_tokens(
    decoder_module: ModuleType, real: tuple[Any, Any, list[int]]
) -> None:
    model, decoder, prompt = real
    reference = mlx_lms_tokens(model, prompt, make_mlx_lm_cache(model))
    for chunk in (16, 7):
        with CacheSession(decoder.geometry, CacheConfig(initial_capacity=8)) as session:
            got = list(decoder_module.generate(decoder, prompt, NEW_TOKENS, chunk=chunk))
            assert session.control.length == len(prompt) + NEW_TOKENS - 1
        assert got == reference, f"chunks of {chunk}"
    changed = [*prompt[:-1], prompt[-1] + 1]
    with CacheSession(decoder.geometry):
        other = list(decoder_module.generate(decoder, changed, NEW_TOKENS))
    assert other != reference, "the prompt makes no difference"


@pytest.mark.models
def test_real_models_with_wrapped_windows_give_mlx_lms_tokens(
    decoder_module: ModuleType, real: tuple[Any, Any, list[int]]
) -> None:
    model, decoder, prompt = real
    with narrowed(model) as rings:
        reference = mlx_lms_tokens(model, prompt, rings)
    # SmolLM2 has no windows of its own: there, all layers get one.
    own = decoder.geometry.windows
    windows = [NARROW if window or not any(own) else 0 for window in own]
    narrow = decoder.geometry.with_windows(windows)
    with CacheSession(narrow, CacheConfig(spare=4)) as session:
        got = list(decoder_module.generate(decoder, prompt, NEW_TOKENS, chunk=9))
        assert session.control.length > NARROW + 4, "no ring wrapped"
    assert got == reference
    with CacheSession(decoder.geometry):
        wide = list(decoder_module.generate(decoder, prompt, NEW_TOKENS))
    assert wide != reference, "the window makes no difference"


@contextmanager
def narrowed(model: Any) -> Iterator[list[Any]]:
    """mlx-lm's caches for windows of NARROW, and masks that fit them."""
    if model.model_type != "gemma3_text":
        yield [RotatingKVCache(max_size=NARROW) for _ in model.layers]
        return
    before = model.args.sliding_window
    model.args.sliding_window = model.model.window_size = NARROW
    try:
        yield make_mlx_lm_cache(model)
    finally:
        model.args.sliding_window = model.model.window_size = before
