"""Every family that mlx-lm runs is refused when the engine is made, or answers as alone."""

from __future__ import annotations

import pytest

from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import UnsupportedModelError
from tests.support import family_configs_a_to_h, family_configs_i_to_z
from tests.support.engine_runs import KINDS, alone, prompts_of, run, tiny
from tests.support.tiny_models import all_families

pytestmark = pytest.mark.slow

NOT_RUNNABLE = {**family_configs_a_to_h.NOT_RUNNABLE, **family_configs_i_to_z.NOT_RUNNABLE}
FAMILIES = sorted(name for name in all_families() if name not in NOT_RUNNABLE)
#: The first 22 have recurrent state, the others go about attention or positions in their own way.
REFUSED = {
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "falcon_h1",
    "gear",
    "granitemoehybrid",
    "jamba",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "lfm2-vl",
    "lfm2_moe",
    "longcat_flash_ngram",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "prism_hadamard_qwen35",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
    "afm7",
    "deepseek_v3",
    "deepseek_v32",
    "gemma2",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_bigcode",
    "internlm2",
    "internlm3",
    "kimi_k25",
    "kimi_vl",
    "llama4",
    "longcat_flash",
    "minimax_m3_vl",
    "mistral4",
    "phi3small",
    "plamo",
    "stablelm",
}
COUNT = 8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_refused_or_answers_as_alone(family):
    model = tiny(family)
    # The kinds share the routing; each family meets one of them.
    kind = KINDS[FAMILIES.index(family) % 2]
    if family in REFUSED:
        with pytest.raises(UnsupportedModelError):
            Engine(model, 64, kind)
        return
    prompts = prompts_of(family, (3, 30, 11))
    expected = [alone(model, prompt, COUNT) for prompt in prompts]
    engine = Engine(model, 128, kind, step_tokens=13, max_active=4, spare=2)
    requests = [engine.submit(prompt, max_tokens=COUNT) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == expected
