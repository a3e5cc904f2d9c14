"""The KV cache for running Hugging Face LLMs with Apple's MLX.

Names are resolved on first use: the integer side (`mlx_kvcache.layout`, the geometry and the
config) can be imported where MLX is not installed, and the command line begins at once.
"""

# What type checkers take for typing's, which would be the first module to wait for.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlx_kvcache.cache.attention import AttendSpec, attend
    from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
    from mlx_kvcache.cache.cells import MLXCellCache
    from mlx_kvcache.cache.sequence import MLXSequenceCache
    from mlx_kvcache.cache.snapshot import Snapshot
    from mlx_kvcache.control.factory import FACTORY, CacheFactory
    from mlx_kvcache.control.op import update_and_attend
    from mlx_kvcache.control.protocols import (
        AttentionBackend,
        Cache,
        SequenceControl,
        SequencePlanner,
        SharedControl,
        StepBackend,
    )
    from mlx_kvcache.control.registry import REGISTRY, CacheRegistry, CacheSession, current_cache
    from mlx_kvcache.engine.engine import Engine
    from mlx_kvcache.errors import KVCacheError
    from mlx_kvcache.facts.config import CacheConfig, validate
    from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer
    from mlx_kvcache.facts.metadata_file import read_metadata, write_metadata
    from mlx_kvcache.integrations.compiled import CompiledModel, compiled
    from mlx_kvcache.integrations.mlx_lm import PromptCache, make_prompt_cache

__version__ = "0.1.0"

__all__ = [
    "FACTORY",
    "REGISTRY",
    "AttendSpec",
    "AttentionBackend",
    "Cache",
    "CacheConfig",
    "CacheFactory",
    "CacheGeometry",
    "CacheRegistry",
    "CacheSession",
    "CompiledModel",
    "Engine",
    "KVCacheError",
    "LayerGeometry",
    "LayerPolicy",
    "MLXBatchedSequenceCache",
    "MLXCellCache",
    "MLXSequenceCache",
    "ModelLayer",
    "PromptCache",
    "SequenceControl",
    "SequencePlanner",
    "SharedControl",
    "Snapshot",
    "StepBackend",
    "__version__",
    "attend",
    "compiled",
    "current_cache",
    "make_prompt_cache",
    "read_metadata",
    "update_and_attend",
    "validate",
    "write_metadata",
]

#: Where the names are.
_HOMES = {
    "cache.attention": ("AttendSpec", "attend"),
    "cache.batched": ("MLXBatchedSequenceCache",),
    "cache.cells": ("MLXCellCache",),
    "cache.sequence": ("MLXSequenceCache",),
    "cache.snapshot": ("Snapshot",),
    "control.factory": ("FACTORY", "CacheFactory"),
    "control.op": ("update_and_attend",),
    "control.protocols": (
        "AttentionBackend",
        "Cache",
        "SequenceControl",
        "SequencePlanner",
        "SharedControl",
        "StepBackend",
    ),
    "control.registry": ("REGISTRY", "CacheRegistry", "CacheSession", "current_cache"),
    "engine.engine": ("Engine",),
    "errors": ("KVCacheError",),
    "facts.config": ("CacheConfig", "validate"),
    "facts.geometry": ("CacheGeometry", "LayerGeometry", "LayerPolicy", "ModelLayer"),
    "facts.metadata_file": ("read_metadata", "write_metadata"),
    "integrations.compiled": ("CompiledModel", "compiled"),
    "integrations.mlx_lm": ("PromptCache", "make_prompt_cache"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
