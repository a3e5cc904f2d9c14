"""Load a model for mlx-lm: a named demo, a GGUF file, a directory, or a hub id."""

from mlx_kvcache.models.demos import DEMOS, Demo
from mlx_kvcache.models.loading import load
from mlx_kvcache.models.resolve import read_config, resolve
from mlx_kvcache.models.store import home

__all__ = ["Demo", "available", "home", "load", "read_config", "resolve"]


def available() -> tuple[Demo, ...]:
    """The named demos, which need no model hub: name, description, license, download size."""
    return tuple(DEMOS.values())
