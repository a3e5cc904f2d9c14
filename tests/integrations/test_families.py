"""Every family that mlx-lm runs gives the same logits on our cache as on mlx-lm's own.

The three chunkings put whole windows, wraps in the middle of a step, and decode steps against
each other; the small rings make every one of them wrap several times. mlx-lm is asked for all
tokens in one step, and for the same chunks where that is not what comes out of ours.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from mlx_kvcache import make_prompt_cache
from tests.support import family_configs_a_to_h, family_configs_i_to_z
from tests.support.tiny_models import all_families, build, logits_in_chunks, random_tokens

pytestmark = pytest.mark.slow

NOT_RUNNABLE = {**family_configs_a_to_h.NOT_RUNNABLE, **family_configs_i_to_z.NOT_RUNNABLE}
#: Where mlx-lm's own caches give other logits for other chunks.
MLX_LM_DIFFERS = {
    **family_configs_a_to_h.KNOWN_MLX_LM_DIFFERENCES,
    **family_configs_i_to_z.KNOWN_MLX_LM_DIFFERENCES,
}
FAMILIES = sorted(name for name in all_families() if name not in NOT_RUNNABLE)
COUNT = 40
CHUNKINGS = {
    "whole": [COUNT],
    "sevens": [7] * 5 + [5],
    "prompt and steps": [13] + [1] * (COUNT - 13),
}
TOLERANCE = 1e-4


def finite_columns(logits: mx.array) -> np.ndarray[Any, Any]:
    """The logits [N, V] without the columns that a model sets to -inf for good."""
    array = np.array(logits[0])
    columns = array[:, np.isfinite(array).all(axis=0)]
    assert columns.shape[1] > 1
    return columns


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_mlx_lm_in_any_chunking(name: str) -> None:
    config = all_families()[name]
    model = build(name, config)
    tokens = random_tokens(config, COUNT, seed=1)

    def theirs(chunks: list[int]) -> np.ndarray[Any, Any]:
        cache = make_mlx_lm_cache(model)
        return finite_columns(logits_in_chunks(model, tokens, cache, chunks))

    in_one_go = theirs([COUNT])
    for chunks in CHUNKINGS.values():
        cache = make_prompt_cache(model, initial_capacity=4, spare=3)
        ours = finite_columns(logits_in_chunks(model, tokens, cache, chunks))
        assert cache.sequence.length == COUNT
        if name in MLX_LM_DIFFERS and name != "phi3small":
            continue
        if not np.abs(ours - in_one_go).max() <= TOLERANCE:
            # phi3small's logits depend on the chunks, those of recurrent layers by rounding.
            np.testing.assert_allclose(ours, theirs(chunks), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_early_token_changes_the_last_logits(name: str) -> None:
    config = all_families()[name]
    model = build(name, config)
    tokens = random_tokens(config, COUNT, seed=1)
    changed = list(tokens)
    near = COUNT - 5
    changed[near] = (tokens[near] + 1) % 50
    logits = [
        finite_columns(
            logits_in_chunks(model, each, make_prompt_cache(model), [COUNT - 3, 1, 1, 1])
        )
        for each in (tokens, changed)
    ]
    # phi3small's block-sparse layers are not causal within a chunk, so only what follows counts.
    if name != "phi3small":
        np.testing.assert_allclose(logits[0][:near], logits[1][:near], atol=TOLERANCE, rtol=0)
    assert np.abs(logits[0][-1] - logits[1][-1]).max() > 1e-2


def test_plamo3_is_the_same_in_every_chunking_where_mlx_lm_is_not() -> None:
    config = all_families()["plamo3"]
    model = build("plamo3", config)
    tokens = random_tokens(config, COUNT, seed=1)
    in_one_go = finite_columns(logits_in_chunks(model, tokens, make_mlx_lm_cache(model), [COUNT]))
    for chunks in CHUNKINGS.values():
        ours = finite_columns(logits_in_chunks(model, tokens, make_prompt_cache(model), chunks))
        np.testing.assert_allclose(ours, in_one_go, atol=TOLERANCE, rtol=0)
    by_sevens = logits_in_chunks(model, tokens, make_mlx_lm_cache(model), CHUNKINGS["sevens"])
    assert np.abs(finite_columns(by_sevens) - in_one_go).max() > 0.1


def test_a_batch_gives_each_row_the_logits_it_has_alone() -> None:
    config = all_families()["gemma3_text"]
    model = build("gemma3_text", config)
    rows = [random_tokens(config, COUNT, seed=seed) for seed in (1, 2, 3)]
    cache = make_prompt_cache(model, spare=3)
    batch = mx.array(rows)
    pieces = [model(batch[:, :17], cache=cache)]
    pieces += [model(batch[:, i : i + 1], cache=cache) for i in range(17, COUNT)]
    together = np.array(mx.concatenate(pieces, axis=1))
    for row, tokens in zip(together, rows, strict=True):
        alone = logits_in_chunks(model, tokens, make_prompt_cache(model), [COUNT])
        np.testing.assert_allclose(row, np.array(alone[0]), atol=TOLERANCE, rtol=0)
