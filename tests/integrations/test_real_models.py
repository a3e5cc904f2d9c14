"""SmolLM2 and Gemma 3 270M: the greedy tokens of mlx-lm's own caches, token for token.

float32 throughout: in a half precision greedy ties flip between chunk sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from mlx_kvcache import compiled, make_prompt_cache
from mlx_kvcache.layout import runs
from mlx_kvcache.models import load

pytestmark = pytest.mark.models

NEW_TOKENS = 64
CHUNKS = (1, 7, 64, 2048)
SHORT = "The history of the city of Paris begins"
LONG = (
    "The old lighthouse keeper wrote in his journal every evening. On Monday he noted the wind, on "
    "Tuesday a ship from Lisbon, on Wednesday nothing at all, and on Thursday he found a bottle on "
    "the beach. In the bottle was a letter, written in a hand he did not know, and the letter "
    "began with these words: my dear friend, by the time you read this I will have crossed the "
    "mountains, and what I promised you last spring lies buried under"
)
NARROW = 32

Model = tuple[nn.Module, Any]


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def gemma3() -> Model:
    return load("gemma3-270m", dtype="float32")


def greedy(model: nn.Module, prompt: list[int], cache: list[Any], chunk: int) -> list[int]:
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=NEW_TOKENS,
        prompt_cache=cache,
        prefill_step_size=chunk,
    )
    return [int(token) for token, _ in steps]


def check(model: nn.Module, prompt: list[int], reference: list[int], **choices: Any) -> None:
    for chunk in CHUNKS:
        cache = make_prompt_cache(model, **choices)
        assert greedy(model, prompt, cache, chunk) == reference, f"chunks of {chunk}"
        # The newest token has been read by the step that was already under way.
        assert cache.sequence.length == len(prompt) + NEW_TOKENS
    changed = [*prompt[:-4], prompt[-4] + 1, *prompt[-3:]]
    other = greedy(model, changed, make_prompt_cache(model, **choices), CHUNKS[-1])
    assert other != reference, "the prompt makes no difference"


@contextmanager
def narrow_gemma(model: Any, window: int) -> Iterator[None]:
    """Make mlx-lm run the model with another window, in its caches and in its masks."""
    before = model.args.sliding_window
    model.args.sliding_window = model.model.window_size = window
    try:
        yield
    finally:
        model.args.sliding_window = model.model.window_size = before


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
def test_smollm2_gives_mlx_lms_tokens(smollm2: Model, text: str) -> None:
    model, tokenizer = smollm2
    prompt = tokenizer.encode(text)
    reference = greedy(model, prompt, make_mlx_lm_cache(model), CHUNKS[-1])
    check(model, prompt, reference, initial_capacity=16)


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
def test_smollm2_with_narrow_windows_gives_mlx_lms_tokens(smollm2: Model, text: str) -> None:
    model, tokenizer = smollm2
    prompt = tokenizer.encode(text)
    rings = [RotatingKVCache(max_size=NARROW) for _ in model.layers]
    reference = greedy(model, prompt, rings, CHUNKS[-1])
    check(model, prompt, reference, windows=[NARROW] * len(model.layers), spare=8)
    if len(prompt) > NARROW:
        assert reference != greedy(model, prompt, make_mlx_lm_cache(model), CHUNKS[-1])


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
def test_gemma3_with_narrow_windows_gives_mlx_lms_tokens(gemma3: Model, text: str) -> None:
    model, tokenizer = gemma3
    prompt = tokenizer.encode(text)
    own = make_prompt_cache(model).sequence.geometry.windows
    assert own.count(512) == 15
    assert own.count(0) == 3
    with narrow_gemma(model, NARROW):
        reference = greedy(model, prompt, make_mlx_lm_cache(model), CHUNKS[-1])
    windows = [NARROW if window else 0 for window in own]
    check(model, prompt, reference, windows=windows, spare=8)


def test_gemma3_gives_mlx_lms_tokens_past_its_own_window(gemma3: Model) -> None:
    model, tokenizer = gemma3
    words = tokenizer.encode(LONG)
    prompt = (words * 7)[:540]
    reference = greedy(model, prompt, make_mlx_lm_cache(model), CHUNKS[-1])
    cache = make_prompt_cache(model, spare=16)
    assert greedy(model, prompt, cache, 64) == reference
    ring = cache.sequence.layout.layers[0]
    assert cache.sequence.length > ring.size, "the ring never wrapped"


@pytest.mark.parametrize(
    ("name", "narrow"), [("smollm2", False), ("gemma3", False), ("gemma3", True)]
)
def test_compiled_steps_give_the_same_tokens(name, narrow, request, monkeypatch):
    """Past wraps and growth, and with chunks, rewinds and forks in between."""
    monkeypatch.setattr(runs, "READ_ROWS", 32)
    model, tokenizer = request.getfixturevalue(name)
    choices: dict[str, Any] = {"initial_capacity": 64, "spare": 9}
    if narrow:
        choices["windows"] = [NARROW]
    fast = compiled(model, pytest.fail)
    prompt = tokenizer.encode(LONG)
    answers = []
    for each in (model, fast):
        cache = make_prompt_cache(model, **choices)
        tokens = greedy(each, prompt, cache, 64)
        cache.rewind(cache.length - 5)
        tokens += greedy(each, prompt[:7], cache, 4)
        twin = cache.fork()
        tokens += greedy(each, prompt[7:20], cache, 64)
        tokens += greedy(each, prompt[9:30], twin, 64)
        answers.append(tokens)
        rings = [layer for layer in cache.sequence.layers if layer.steps.ring_size]
        assert all(layer.offset > 5 * layer.steps.ring_size for layer in rings if narrow)
    assert answers[0] == answers[1]
    assert fast.traces >= 4
    other = greedy(fast, [*prompt[:-4], prompt[-4] + 1], make_prompt_cache(model, **choices), 64)
    assert other != answers[1][:NEW_TOKENS]
