"""The KV cache for running Hugging Face LLMs with Apple's MLX.

Names are resolved on first use, so that the integer side (`mlx_kvcache.layout`, the geometry and
the config) can be imported where MLX is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_kvcache.control.factory import FACTORY, CacheFactory
from mlx_kvcache.control.protocols import (
    AttentionBackend,
    Cache,
    SequenceControl,
    SequencePlanner,
    SharedControl,
    StepBackend,
)
from mlx_kvcache.control.registry import REGISTRY, CacheRegistry, CacheSession, current_cache
from mlx_kvcache.errors import KVCacheError
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer
from mlx_kvcache.facts.metadata_file import read_metadata, write_metadata

if TYPE_CHECKING:
    from mlx_kvcache.cache.attention import AttendSpec, attend
    from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
    from mlx_kvcache.cache.cells import MLXCellCache
    from mlx_kvcache.cache.sequence import MLXSequenceCache
    from mlx_kvcache.cache.snapshot import Snapshot
    from mlx_kvcache.control.op import update_and_attend
    from mlx_kvcache.engine.engine import Engine
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
    "current_cache",
    "make_prompt_cache",
    "read_metadata",
    "update_and_attend",
    "validate",
    "write_metadata",
]

#: Where the names are that need MLX.
_NEEDS_MLX = {
    "AttendSpec": "mlx_kvcache.cache.attention",
    "Engine": "mlx_kvcache.engine.engine",
    "MLXBatchedSequenceCache": "mlx_kvcache.cache.batched",
    "MLXCellCache": "mlx_kvcache.cache.cells",
    "MLXSequenceCache": "mlx_kvcache.cache.sequence",
    "Snapshot": "mlx_kvcache.cache.snapshot",
    "PromptCache": "mlx_kvcache.integrations.mlx_lm",
    "attend": "mlx_kvcache.cache.attention",
    "make_prompt_cache": "mlx_kvcache.integrations.mlx_lm",
    "update_and_attend": "mlx_kvcache.control.op",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_MLX:
        return getattr(import_module(_NEEDS_MLX[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
