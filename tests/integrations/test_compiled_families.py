"""Every family that mlx-lm runs, compiled: the same logits, or a reason why it runs uncompiled."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_kvcache import compiled, make_prompt_cache
from mlx_kvcache.integrations import compiled as compiled_module
from mlx_kvcache.layout import runs
from tests.support import family_configs_a_to_h, family_configs_i_to_z
from tests.support.tiny_models import all_families, build, random_tokens

pytestmark = pytest.mark.slow

NOT_RUNNABLE = {**family_configs_a_to_h.NOT_RUNNABLE, **family_configs_i_to_z.NOT_RUNNABLE}
FAMILIES = sorted(name for name in all_families() if name not in NOT_RUNNABLE)
COUNT = 50
PROMPT = 9
TOLERANCE = 1e-4
#: Those that run uncompiled, and why: what the reason names.
UNCOMPILED = {
    # Positions are taken from the number of rows, or of blocks of them.
    "afm7": "counts the rows",
    "minimax_m3_vl": "ranks the rows",
    "phi3small": "counts the rows",
    # Their indexers rank all rows there are, by a rank of the mask.
    "deepseek_v32": "cannot be traced",
    "glm_moe_dsa": "cannot be traced",
    # The offset is turned into a number of the host.
    "dbrx": "Attempting to eval an array",
    "gpt_bigcode": "Attempting to eval an array",
    "internlm2": "Attempting to eval an array",
    "internlm3": "Attempting to eval an array",
    "llama4": "arange",
}
#: Those without a flat layer, which are traced once.
ALL_RINGS = {"recurrent_gemma"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits(name, monkeypatch):
    monkeypatch.setattr(runs, "READ_ROWS", 16)
    monkeypatch.setattr(compiled_module, "WORTH_COMPILING", 2)
    config = all_families()[name]
    model = build(name, config)
    told: list[str] = []
    fast = compiled(model, told.append)
    tokens = random_tokens(config, COUNT, seed=1)
    caches = [make_prompt_cache(model, initial_capacity=20, spare=3) for _ in range(2)]
    for begin, end in [(0, PROMPT), *((place, place + 1) for place in range(PROMPT, COUNT))]:
        step = mx.array([tokens[begin:end]])
        got, expected = fast(step, cache=caches[0]), model(step, cache=caches[1])
        known = mx.isfinite(expected)
        assert mx.array_equal(known, mx.isfinite(got))
        assert float(mx.where(known, mx.abs(got - expected), 0).max()) <= TOLERANCE, begin
    if name in UNCOMPILED:
        assert UNCOMPILED[name] in (fast.refusal or "")
        assert len(told) == 1
    else:
        assert fast.refusal is None
        assert fast.traces >= (1 if name in ALL_RINGS else 3)
