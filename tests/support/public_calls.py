"""The public constructors and functions, with right arguments for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

import mlx_kvcache as kv
from mlx_kvcache.engine import Engine
from tests.support.engine_runs import tiny
from tests.support.public_objects import (
    ATTEND,
    CONFIG,
    GEOMETRY,
    NONE,
    OPTIONS,
    sequence_cache,
)


def configured(**fields: Any) -> None:
    """A config is checked with the geometry that it is for."""
    kv.validate(GEOMETRY, kv.CacheConfig(**fields))


def made_engine(**choices: Any) -> Engine:
    engine = Engine(tiny("llama"), **choices)
    engine.shutdown()
    return engine


def op(**arguments: Any) -> mx.array:
    return kv.update_and_attend(**{"cache": sequence_cache(), **arguments})


GEOMETRIES = {"geometry": {"a geometry"}, "config": {"None", "a config"}}
CACHE_FIELDS = {
    "kv_dtype": NONE,
    "max_context": NONE,
    "max_write": NONE,
}
#: Constructors and functions: right arguments, and the strange values that are right too.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, set[str]]]] = {
    "MLXSequenceCache": (kv.MLXSequenceCache, {"geometry": GEOMETRY, "config": CONFIG}, GEOMETRIES),
    "MLXCellCache": (kv.MLXCellCache, {"geometry": GEOMETRY, "config": CONFIG}, GEOMETRIES),
    "MLXBatchedSequenceCache": (
        kv.MLXBatchedSequenceCache,
        {"geometry": GEOMETRY, "config": CONFIG},
        GEOMETRIES,
    ),
    "CacheConfig": (
        configured,
        {
            "capacity": 9,
            "kv_dtype": "float16",
            "initial_capacity": 2,
            "spare": 3,
            "max_context": 9,
        },
        CACHE_FIELDS,
    ),
    "validate": (
        kv.validate,
        {"geometry": GEOMETRY, "config": CONFIG},
        {"geometry": {"a geometry"}, "config": {"a config"}},
    ),
    "make_prompt_cache": (
        partial(kv.make_prompt_cache, tiny("llama")),
        {
            "capacity": 9,
            "initial_capacity": 2,
            "kv_dtype": "float16",
            "spare": 3,
            "windows": [0, 3, 0, 3],
        },
        {**CACHE_FIELDS, "capacity": NONE, "windows": NONE},
    ),
    "compiled": (
        partial(kv.compiled, tiny("llama")),
        {"notify": print},
        {"notify": {"None", "a type", "a function"}},
    ),
    "Engine": (
        made_engine,
        {
            "capacity": 20,
            "kind": "cell",
            "max_active": 3,
            "step_tokens": 5,
            "max_context": 9,
            "kv_dtype": "float16",
            "initial_capacity": 2,
            "spare": 3,
            "windows": [0, 3, 0, 3],
        },
        {
            **CACHE_FIELDS,
            "windows": NONE,
            "step_tokens": {"None", "a large number"},
            "initial_capacity": NONE,
        },
    ),
    "CacheFactory": (
        kv.CacheFactory,
        {"builders": {("mlx", "own"): kv.MLXCellCache}, "group": "nobodys.group"},
        {"builders": {"None", "a dict"}, "group": {"None", "a string", "an empty string"}},
    ),
    "CacheRegistry": (kv.CacheRegistry, {}, {}),
    "CacheSession": (
        lambda **given: kv.CacheSession(**given).open().close(),
        {
            "geometry": GEOMETRY,
            "config": CONFIG,
            "backend": "mlx",
            "kind": "cell",
            "factory": kv.FACTORY,
            "registry": kv.CacheRegistry(),
        },
        GEOMETRIES,
    ),
    "CacheGeometry": (
        kv.CacheGeometry,
        {"layers": GEOMETRY.layers, "model_layers": (kv.ModelLayer((0,)), kv.ModelLayer((1,)))},
        {"model_layers": {"a list"}},
    ),
    "LayerGeometry": (
        kv.LayerGeometry,
        {
            "policy": kv.LayerPolicy.flat(),
            "kv_heads": 2,
            "key_dim": 4,
            "value_dim": 0,
            "shared": True,
        },
        {
            "kv_heads": {"a large number"},
            "key_dim": {"a large number"},
            "value_dim": {"a large number"},
            "shared": {"a bool"},
        },
    ),
    "LayerPolicy": (
        kv.LayerPolicy,
        {"kind": "ring", "window": 3},
        {"window": {"a large number"}},
    ),
    "ModelLayer": (
        kv.ModelLayer,
        {"caches": (0,), "shares": False, "recurrent": True},
        {"caches": {"a list"}, "shares": {"a bool"}, "recurrent": {"a bool"}},
    ),
    "AttendSpec": (
        kv.AttendSpec,
        {"kind": "explicit", "mask": mx.array([[True]])},
        {},
    ),
    "attend": (
        kv.attend,
        {
            **{name: value for name, value in ATTEND.items() if name != "layer"},
            "spec": kv.AttendSpec("causal"),
        },
        OPTIONS,
    ),
    "update_and_attend": (op, {**ATTEND, "positions": 6}, {**OPTIONS, "positions": set()}),
    "read_metadata": (kv.read_metadata, {}, {}),
    "write_metadata": (kv.write_metadata, {}, {}),
    "current_cache": (kv.current_cache, {}, {}),
}
#: Called with arguments that lead somewhere, by tests of their own.
CALLED_ELSEWHERE = {"read_metadata", "write_metadata", "current_cache"}
#: No call: instances, protocols, and what only the package makes.
NO_CALLS = {
    "FACTORY", "REGISTRY", "__version__", "KVCacheError", "AttentionBackend", "Cache",
    "SequenceControl", "SequencePlanner", "SharedControl", "StepBackend", "Snapshot", "PromptCache",
    "CompiledModel",
}  # fmt: skip
