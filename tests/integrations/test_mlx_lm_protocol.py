"""What mlx-lm's callers do with a cache, done to ours."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    LRUPromptCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.models.cache import (
    make_prompt_cache as make_mlx_lm_cache,
)

from mlx_kvcache import CacheConfig, make_prompt_cache
from mlx_kvcache.errors import (
    CapacityError,
    ConfigError,
    GeometryError,
    RewindError,
    UpdateShapeError,
)
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer, PromptCache
from tests.support.tiny_models import all_families, build, logits_in_chunks, random_tokens

MakeCache = Callable[[nn.Module], list[Any]]
WINDOW_FAMILIES = ["gemma3_text", "gemma3n", "gemma4_text", "gpt_oss", "llama", "cohere2"]


def tiny(name: str, seed: int = 0) -> nn.Module:
    return build(name, all_families()[name], seed)


def greedy(model: nn.Module, prompt: list[int], count: int, cache: list[Any]) -> list[int]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, prefill_step_size=16
    )
    return [int(token) for token, _ in steps]


def last_logits(model: nn.Module, tokens: list[int], cache: list[Any]) -> np.ndarray[Any, Any]:
    return np.array(logits_in_chunks(model, tokens, cache, [len(tokens)])[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WINDOW_FAMILIES, "qwen3", "deepseek_v3", "qwen3_next"])
def test_generate_step_gives_the_tokens_of_mlx_lms_caches(name: str) -> None:
    model = tiny(name)
    prompt = random_tokens(model, 37, seed=3)
    ours = greedy(model, prompt, 24, make_prompt_cache(model, spare=4))
    assert ours == greedy(model, prompt, 24, make_mlx_lm_cache(model))
    other = [*prompt[:-1], (prompt[-1] + 1) % 50]
    assert ours != greedy(model, other, 24, make_prompt_cache(model, spare=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOW_FAMILIES)
def test_speculative_decoding_equals_greedy_past_the_window(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = tiny(name), tiny(name, seed=7)
    prompt = random_tokens(model, 5, seed=4)
    made = []

    def make(of: Any) -> Any:
        made.append(make_prompt_cache(of, spare=4))
        return made[-1]

    # Given no caches, mlx-lm makes them by this name; given a list, it splits it by layers, which
    # is wrong for models with fewer caches than layers.
    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "make_prompt_cache", make)
    steps = list(
        speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=40)
    )
    tokens = [int(token) for token, _, _ in steps]
    assert tokens == greedy(model, prompt, 40, make_prompt_cache(model))
    assert not all(from_draft for _, _, from_draft in steps), "no draft token was ever rejected"
    for cache in made:
        assert cache.sequence.layout.high_water > max(cache.sequence.geometry.windows) + 3 + 8
        assert cache.sequence.rewind_floor > 0, "the rings have wrapped"


@pytest.mark.parametrize("name", WINDOW_FAMILIES)
def test_trimming_a_wrapped_cache_equals_a_cold_run(name: str) -> None:
    model = tiny(name)
    tokens = random_tokens(model, 40, seed=5)
    cache = make_prompt_cache(model, spare=8)
    logits_in_chunks(model, tokens, cache, [30] + [1] * 10)
    assert trim_each(cache, 6) == {6}
    replaced = [(token + 3) % 50 for token in tokens[34:]]
    warm = last_logits(model, replaced, cache)
    cold = last_logits(model, tokens[:34] + replaced, make_prompt_cache(model))
    np.testing.assert_allclose(warm, cold, atol=1e-4)
    assert np.abs(warm - last_logits(model, tokens, make_prompt_cache(model))).max() > 1e-2


def trim_each(cache: list[Any], count: int) -> set[int]:
    return {layer.trim(count) for layer in cache}


def test_trim_refuses_what_a_ring_has_overwritten_and_changes_nothing() -> None:
    model = tiny("gemma3_text")
    cache = make_prompt_cache(model, spare=4)
    tokens = random_tokens(model, 40, seed=6)
    logits_in_chunks(model, tokens, cache, [40])
    before = [np.array(array) for array in cache.sequence.state]
    for layer in cache:
        with pytest.raises(RewindError, match="36 to 40 can be reached"):
            layer.trim(5)
    assert [layer.offset for layer in cache] == [40] * len(cache)
    for old, array in zip(before, cache.sequence.state, strict=True):
        np.testing.assert_array_equal(old, np.array(array))
    following = last_logits(model, [7], cache)
    cold = last_logits(model, [*tokens, 7], make_prompt_cache(model))
    np.testing.assert_allclose(following, cold, atol=1e-4)


def test_is_trimmable_only_while_every_position_can_be_reached() -> None:
    model = tiny("gemma3_text")
    cache = make_prompt_cache(model, spare=4)
    assert can_trim_prompt_cache(cache)
    window = max(cache.sequence.geometry.windows)
    logits_in_chunks(model, random_tokens(model, window + 3, seed=1), cache, [window + 3])
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, window + 3) == window + 3
    assert cache.sequence.length == 0
    logits_in_chunks(model, random_tokens(model, window + 4, seed=1), cache, [window + 4])
    assert not can_trim_prompt_cache(cache)


def test_mlx_lm_trims_a_wrapped_cache_exactly_or_is_told_why_not() -> None:
    """Its speculation trims without another question, and would not hear of a no."""
    model = tiny("gemma3_text")
    tokens = random_tokens(model, 40, seed=5)
    cache = make_prompt_cache(model, spare=8)
    logits_in_chunks(model, tokens, cache, [30] + [1] * 10)
    assert cache.sequence.rewind_floor > 0, "the rings have wrapped"
    assert not can_trim_prompt_cache(cache)
    before = [np.array(array) for array in cache.sequence.state]
    with pytest.raises(RewindError, match="overwritten"):
        trim_prompt_cache(cache, 9)
    assert [layer.offset for layer in cache] == [40] * len(cache)
    for old, array in zip(before, cache.sequence.state, strict=True):
        np.testing.assert_array_equal(old, np.array(array))
    assert trim_prompt_cache(cache, 6) == 6
    warm = last_logits(model, [3, 4], cache)
    cold = last_logits(model, [*tokens[:34], 3, 4], make_prompt_cache(model))
    np.testing.assert_allclose(warm, cold, atol=1e-4)
    assert np.abs(warm - last_logits(model, [*tokens, 3, 4], make_prompt_cache(model))).max() > 1e-2


def test_mlx_lms_prompt_cache_is_told_no_where_it_may_trim_any_number() -> None:
    model = tiny("gemma3_text")
    tokens = random_tokens(model, 40, seed=5)
    for wrapped in (False, True):
        spare = 4 if wrapped else 64
        cache = make_prompt_cache(model, spare=spare)
        logits_in_chunks(model, tokens, cache, [30] + [1] * 10)
        assert (cache.sequence.rewind_floor > 0) == wrapped
        entries = LRUPromptCache()
        entries.insert_cache("model", tokens, cache)
        found, rest = entries.fetch_nearest_cache("model", [*tokens[:20], 1, 2, 3])
        assert (found is None) == wrapped
        start = make_prompt_cache(model) if found is None else found
        warm = last_logits(model, rest, start)
        cold = last_logits(model, [*tokens[:20], 1, 2, 3], make_prompt_cache(model))
        np.testing.assert_allclose(warm, cold, atol=1e-4)


def test_trim_answers_what_it_could_drop() -> None:
    model = tiny("qwen3")
    cache = make_prompt_cache(model)
    logits_in_chunks(model, random_tokens(model, 5, seed=1), cache, [5])
    assert trim_each(cache, 0) == {0}
    assert trim_each(cache, 9) == {5}
    assert {layer.offset for layer in cache} == {0}


def test_the_lru_prompt_cache_reuses_a_longer_entry() -> None:
    model = tiny("gemma3_text")
    lru = LRUPromptCache()
    tokens = random_tokens(model, 9, seed=8)
    cache = make_prompt_cache(model)
    logits_in_chunks(model, tokens, cache, [9])
    lru.insert_cache("model", tokens, cache)
    question = [*tokens[:6], 1, 2]
    fetched, rest = lru.fetch_nearest_cache("model", question)
    assert rest == [1, 2]
    cold = last_logits(model, question, make_prompt_cache(model))
    np.testing.assert_allclose(last_logits(model, rest, fetched), cold, atol=1e-4)
    # The stored entry is untouched by what its copy went through.
    again = last_logits(model, [3], cache)
    np.testing.assert_allclose(
        again, last_logits(model, [*tokens, 3], make_prompt_cache(model)), atol=1e-4
    )


def test_a_deep_copy_lives_its_own_life() -> None:
    model = tiny("gemma3_text")
    tokens = random_tokens(model, 30, seed=9)
    cache = make_prompt_cache(model, spare=4)
    logits_in_chunks(model, tokens, cache, [25, 1, 1, 1, 1, 1])
    branch = copy.deepcopy(cache)
    assert isinstance(branch, PromptCache)
    assert branch.sequence is not cache.sequence
    assert branch.sequence.layers[0] is branch[0]
    for each, token in ((branch, 1), (cache, 2)):
        cold = last_logits(model, [*tokens, token], make_prompt_cache(model))
        np.testing.assert_allclose(last_logits(model, [token], each), cold, atol=1e-4)


def test_a_layer_is_never_falsy_and_offers_no_quantized_attention() -> None:
    layer = make_prompt_cache(tiny("llama"))[0]
    assert layer
    assert layer.empty()
    assert layer.offset == 0
    assert layer.size() == 0
    assert layer.nbytes == 0
    for name in ("__len__", "__bool__", "bits", "group_size"):
        assert not hasattr(layer, name)
    mx.eval([layer.state])


def test_sizes_count_tokens_held() -> None:
    model = tiny("gemma3_text")
    cache = make_prompt_cache(model)
    logits_in_chunks(model, random_tokens(model, 20, seed=1), cache, [20])
    windows = cache.sequence.geometry.windows
    assert [layer.size() for layer in cache] == [min(window, 20) or 20 for window in windows]
    assert not any(layer.empty() for layer in cache)
    assert sum(layer.nbytes for layer in cache) == cache.sequence.nbytes > 0


def test_the_state_holds_every_live_array() -> None:
    model = tiny("gemma3_text")
    cache = make_prompt_cache(model)
    logits_in_chunks(model, random_tokens(model, 20, seed=1), cache, [20])
    arrays = [array for layer in cache for array in layer.state[:2]]
    assert [id(array) for array in arrays] == [id(array) for array in cache.sequence.state]
    assert {layer.state[2] for layer in cache} == {20}


def test_a_buffer_can_be_replaced_by_itself_with_a_dependency_only() -> None:
    model = tiny("qwen3")
    cache = make_prompt_cache(model)
    tokens = random_tokens(model, 8, seed=1)
    logits_in_chunks(model, tokens, cache, [8])
    layer = cache[-1]
    layer.keys = mx.depends(layer.keys, mx.array(1.0))
    with pytest.raises(UpdateShapeError, match="same shape and dtype"):
        layer.keys = layer.keys[:, :, :4]
    with pytest.raises(UpdateShapeError, match="same shape and dtype"):
        layer.values = layer.values.astype(mx.float16)
    cold = last_logits(model, [*tokens, 4], make_prompt_cache(model))
    np.testing.assert_allclose(last_logits(model, [4], cache), cold, atol=1e-4)


def test_hybrid_models_keep_mlx_lms_own_state_objects() -> None:
    cache = make_prompt_cache(tiny("qwen3_next"))
    kinds = [type(entry) for entry in cache]
    assert ArraysCache in kinds
    assert MLXLMLayer in kinds
    both = make_prompt_cache(tiny("falcon_h1"))[0]
    assert isinstance(both, CacheList)
    assert [type(child) for child in both.caches] == [ArraysCache, MLXLMLayer]


def test_two_caches_of_one_model_share_nothing() -> None:
    model = tiny("qwen3_next")
    first, second = make_prompt_cache(model), make_prompt_cache(model)
    tokens = random_tokens(model, 12, seed=2)
    logits_in_chunks(model, tokens, first, [12])
    cold = last_logits(model, tokens, second)
    np.testing.assert_allclose(last_logits(model, tokens, make_prompt_cache(model)), cold, atol=0)


def test_a_single_window_is_that_of_the_sliding_layers() -> None:
    model = tiny("gemma3_text")
    cache = make_prompt_cache(model, windows=[4])
    assert set(cache.sequence.geometry.windows) == {0, 4}
    own = make_prompt_cache(model).sequence.geometry.windows
    assert [bool(window) for window in cache.sequence.geometry.windows] == [bool(w) for w in own]
    with pytest.raises(GeometryError, match="has none"):
        make_prompt_cache(tiny("qwen3"), windows=[4])
    tokens = random_tokens(model, 30, seed=3)
    by_steps = logits_in_chunks(model, tokens, cache, [1] * 30)
    whole = logits_in_chunks(model, tokens, make_prompt_cache(model, windows=[4]), [30])
    np.testing.assert_allclose(np.array(by_steps), np.array(whole), atol=1e-4)
    wide = logits_in_chunks(model, tokens, make_prompt_cache(model), [30])
    assert np.abs(np.array(whole - wide)).max() > 1e-2


def test_a_window_of_0_attends_to_everything() -> None:
    model = tiny("gemma3_text")
    tokens = random_tokens(model, 30, seed=3)
    flat = make_prompt_cache(model, windows=[0])
    assert set(flat.sequence.geometry.windows) == {0}
    own = make_prompt_cache(model).sequence.geometry.windows
    wide = make_prompt_cache(model, windows=[window and 100 for window in own])
    narrow = logits_in_chunks(model, tokens, make_prompt_cache(model), [30])
    for chunks in ([30], [7, 7, 7, 7, 2], [1] * 30):
        flat.sequence.clear()
        wide.sequence.clear()
        whole = np.array(logits_in_chunks(model, tokens, flat, chunks))
        np.testing.assert_allclose(
            whole, np.array(logits_in_chunks(model, tokens, wide, chunks)), atol=1e-4
        )
        assert np.abs(whole - np.array(narrow)).max() > 1e-2


def test_windows_must_agree_where_the_model_shares_a_mask() -> None:
    model = tiny("gemma3_text")
    windows = list(make_prompt_cache(model).sequence.geometry.windows)
    sliding = [index for index, window in enumerate(windows) if window]
    windows[sliding[0]] = 3
    with pytest.raises(GeometryError, match="one mask for all of a kind"):
        make_prompt_cache(model, windows=windows)
    with pytest.raises(GeometryError, match="windows were given for"):
        make_prompt_cache(model, windows=[4, 4])
    with pytest.raises(GeometryError, match="a window must be an integer >= 0"):
        make_prompt_cache(model, windows=[-1])


def test_a_prompt_beyond_the_capacity_is_refused() -> None:
    model = tiny("gemma3_text")
    cache = make_prompt_cache(model, capacity=16)
    logits_in_chunks(model, random_tokens(model, 16, seed=1), cache, [16])
    with pytest.raises(CapacityError, match="the capacity is 16"):
        model(mx.array([[1]]), cache=cache)
    assert cache.sequence.length == 16
    assert {layer.offset for layer in cache} == {16}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", 0),
        ("capacity", -1),
        ("initial_capacity", -1),
        ("spare", 0),
        ("kv_dtype", "int8"),
        ("capacity", 1.5),
    ],
)
def test_a_wrong_choice_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        make_prompt_cache(tiny("llama"), **{field: value})


def test_a_storage_dtype_rounds_once_whatever_the_chunks() -> None:
    # An all-flat model computes the same numbers in every chunking, but for their last bits, which
    # some BLAS kernels round otherwise: a few stored rows then differ by one step of bfloat16.
    model = tiny("qwen3")
    tokens = random_tokens(model, 40, seed=3)
    caches = [make_prompt_cache(model, kv_dtype="bfloat16", initial_capacity=4) for _ in range(2)]
    whole = logits_in_chunks(model, tokens, caches[0], [40])
    pieces = logits_in_chunks(model, tokens, caches[1], [13] + [1] * 27)
    assert {array.dtype for array in caches[0].sequence.state} == {mx.bfloat16}
    assert whole.dtype == mx.float32
    exact = logits_in_chunks(model, tokens, make_prompt_cache(model), [40])
    rounding = np.abs(np.array(whole - exact)).max()
    assert 1e-4 < rounding < 0.5
    assert np.abs(np.array(whole - pieces)).max() < 0.1 * rounding


def test_a_purely_recurrent_model_is_refused() -> None:
    from mlx_lm.models.mamba2 import Model, ModelArgs

    args = ModelArgs.from_dict(
        {
            "model_type": "mamba2",
            "num_heads": 4,
            "head_dim": 16,
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.0, 1.0],
            "time_step_rank": "auto",
        }
    )
    with pytest.raises(GeometryError, match="recurrent"):
        make_prompt_cache(Model(args))


def test_the_config_of_a_prompt_cache_is_the_one_asked_for() -> None:
    model = tiny("llama")
    cache = make_prompt_cache(model, 100, initial_capacity=8, kv_dtype="float16", spare=2)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert cache.sequence.config == CacheConfig(100, "float16", 8, 2)
    assert cache.sequence.config.weight_bytes == weights
