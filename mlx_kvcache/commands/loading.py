"""From the options of a run to a loaded model and the cache that was chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx.nn.layers.base import Module

from mlx_kvcache import models
from mlx_kvcache.chat.generation import CacheChoice
from mlx_kvcache.commands.context import position_limit
from mlx_kvcache.commands.options import RunOptions


def load_model(options: RunOptions) -> tuple[Module, Any, CacheChoice]:
    """The model, its tokenizer, and what the options choose of the cache.

    Raises what `models.resolve` and `models.load` raise.
    """
    directory = models.resolve(options.model)
    choice = cache_choice(options, models.read_config(directory))
    model, tokenizer = models.load(directory, dtype=options.dtype)
    return model, tokenizer, choice


def cache_choice(options: RunOptions, config: Mapping[str, Any]) -> CacheChoice:
    """The cache's side of the options; the capacity is the context length unless one is given."""
    limit = position_limit(config)
    source = " (--capacity)"
    if options.capacity is None:
        source = " (the model's context length)" if limit else ""
    return CacheChoice(
        limit if options.capacity is None else options.capacity,
        source,
        options.kv_dtype,
        options.initial_capacity,
        options.spare,
        options.windows,
    )
