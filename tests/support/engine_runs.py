"""Models, prompts, and the tokens of one sequence alone, which every engine must give."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.engine import Engine, Request
from mlx_kvcache.integrations.sampling import Sampling
from tests.support.tiny_models import all_families, build

KINDS = ("cell", "batched")


@cache
def tiny(family: str) -> nn.Module:
    return build(family, all_families()[family])


@cache
def vocabulary(family: str) -> int:
    return int(tiny(family)(mx.zeros((1, 1), mx.int32)).shape[-1])


def prompts_of(family: str, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    size = vocabulary(family)
    return [[generator.randrange(size) for _ in range(length)] for length in lengths]


def alone(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    **choices: Any,
) -> list[int]:
    """What mlx-lm's loop gives for this prompt on a cache of one sequence."""
    sampler, processors = None, None
    if sampling is not None:
        sampler, processors = _mlx_lms(sampling)
        mx.random.seed(sampling.seed or 0)
    tokens: list[int] = []
    steps = generate_step(
        mx.array(list(prompt)),
        model,
        max_tokens=count,
        sampler=sampler,
        logits_processors=processors,
        prompt_cache=make_prompt_cache(model, **choices),
    )
    for token, _ in steps:
        tokens.append(int(token))
        if tokens[-1] in stop:
            break
    return tokens


def _mlx_lms(sampling: Sampling) -> tuple[Any, Any]:
    """mlx-lm's own sampler and processors, told by name what each is for."""
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    given = asdict(sampling)
    given.pop("seed")
    penalties = {name: given.pop(name) for name in tuple(given) if "_penalty" in name}
    sizes = {name: given.pop(name) for name in tuple(given) if "_context_size" in name}
    given["xtc_special_tokens"] = list(given["xtc_special_tokens"])
    return make_sampler(**given), make_logits_processors(**penalties, **sizes)


def run(engine: Engine) -> dict[Request, list[int]]:
    """Run to the end; the tokens by request, as the events told them."""
    told: dict[Request, list[int]] = {}
    for event in engine.run():
        tokens = told.setdefault(event.request, [])
        if event.token is not None:
            tokens.append(event.token)
    return told


def snapshot(engine: Engine) -> Mapping[str, Any]:
    """Everything of an engine that a refused call must not change."""
    cache = engine.cache
    return {
        "used": cache.used,
        "sequences": {sequence: cache.position(sequence) for sequence in cache.sequences},
        "active": engine.active,
        "waiting": engine.waiting,
        "free": engine.free,
        "declared": cache.layout.now.declared,
        "unfinished": dict(cache.unfinished),
        "bytes": cache.nbytes,
    }
