"""Load a model and its tokenizer with mlx-lm, from any name that `resolve` takes."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.errors import StrictDataclassError
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from mlx_kvcache.errors import (
    ConfigError,
    KVCacheError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from mlx_kvcache.facts.config import KV_DTYPES
from mlx_kvcache.models.adapters import adapter_directory, apply_adapter
from mlx_kvcache.models.config_fields import model_fields
from mlx_kvcache.models.progress import loading
from mlx_kvcache.models.resolve import parse_config, resolve
from mlx_kvcache.models.store import has_weights

DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in KV_DTYPES}

# What mlx-lm and transformers let through from a config that lacks a field or has one of another
# type, a weight of another shape, or a weights file that is cut short.
_LOAD_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    RuntimeError,
    StrictDataclassError,
)


def load(
    name: str | Path,
    *,
    dtype: str | mx.Dtype | None = None,
    adapter_path: str | Path | None = None,
    model_config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    lazy: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Module, Any]:
    """The mlx-lm model and tokenizer of `name`, ready to generate.

    `name` and `revision` are what `resolve` takes. `dtype` is "float32", "float16" or "bfloat16"
    (or the mlx dtype); None means float32 where the default device is the CPU, on which it is the
    fast one, and the stored dtype on a GPU. Only floating-point parameters are cast, so packed
    quantized weights stay packed. The rest is as in mlx-lm's own `load`: `adapter_path` is a
    directory with `adapter_config.json` and `adapters.safetensors`, `model_config` goes over the
    fields of the model's config, `tokenizer_config` to transformers' AutoTokenizer; `lazy` leaves
    the weights on disk until they are used; `trust_remote_code` runs the model's own Python files.

    Raises ConfigError for an argument of another form, ModelNotFoundError for a name that leads
    nowhere, a directory without weights or an adapter that is missing, UnsupportedModelError for a
    model that mlx-lm does not have or would run otherwise than its config says,
    ModelFormatError for files that do not fit together.
    """
    chosen = _dtype(dtype)
    _check_objects(model_config=model_config, tokenizer_config=tokenizer_config)
    adapter = None if adapter_path is None else adapter_directory(adapter_path)
    directory = resolve(name, revision=revision)
    _check(directory)
    with loading(_shown(directory)):
        model, ends = _load_model(directory, model_config or {}, trust_remote_code)
        if adapter is not None:
            apply_adapter(model, adapter)
        if chosen is not None:
            cast(model, chosen)
        if not lazy:
            mx.eval([value for _, value in _parameters(model)])
        more = {"trust_remote_code": True} if trust_remote_code else {}
        tokenizer = _load_tokenizer(directory, {**more, **(tokenizer_config or {})}, ends)
    return model, tokenizer


def cast(model: Module, dtype: mx.Dtype) -> None:
    """Give the model's floating-point parameters `dtype`, in place.

    Parameters that the model's `cast_predicate` exempts are left as they are.
    """
    wanted = getattr(model, "cast_predicate", None) or (lambda _: True)
    changed = [
        (path, value.astype(dtype))
        for path, value in _parameters(model)
        if mx.issubdtype(value.dtype, mx.floating) and wanted(path)
    ]
    model.update(tree_unflatten(changed))


def _parameters(model: Any) -> list[tuple[str, Any]]:
    return typing.cast("list[tuple[str, Any]]", tree_flatten(model.parameters()))


def _dtype(dtype: str | mx.Dtype | None) -> mx.Dtype | None:
    if dtype is None:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return mx.float32 if on_cpu else None
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, mx.Dtype) and dtype in DTYPES.values():
        return dtype
    raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}, or None")


def _shown(directory: Path) -> str:
    """The model's name for a person; the hub's client names a snapshot by its commit."""
    for part in directory.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return directory.resolve().name


def _check(directory: Path) -> None:
    if "model_type" not in parse_config(directory / "config.json"):
        raise ModelFormatError(f"{directory / 'config.json'} has no 'model_type'")
    if not has_weights(directory):
        raise ModelNotFoundError(
            f"there are no weights (model*.safetensors) in {directory}; the config alone can be "
            "inspected, not run"
        )


def _check_objects(**objects: Mapping[str, Any] | None) -> None:
    for name, value in objects.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r:.80}; it must be a dict of fields, or None")


def _load_model(directory: Path, changes: Mapping[str, Any], trusted: bool) -> tuple[Module, Any]:
    """The model, its weights not read yet, and the token ids (or id) that end generation."""
    from mlx_lm.utils import load_config, load_model

    try:
        # What was asked for goes over the config, and over what is read out of both.
        fields = {**model_fields({**load_config(directory), **changes}), **changes}
        model, config = load_model(
            directory, lazy=True, model_config=fields, trust_remote_code=trusted
        )
    except KVCacheError:
        raise
    except _LOAD_ERRORS as error:
        if "model_file" in parse_config(directory / "config.json") and not trusted:
            raise UnsupportedModelError(
                f"the model in {directory} brings Python code of its own, which only runs with "
                "trust_remote_code=True; pass it if you trust the model"
            ) from error
        if "supported" in str(error).lower():
            raise UnsupportedModelError(
                f"mlx-lm cannot run the model in {directory}: {error}"
            ) from error
        raise ModelFormatError(
            f"the model in {directory} does not load ({type(error).__name__}: {error}); its "
            "config and weights do not fit together, or a file is damaged"
        ) from error
    return model, config.get("eos_token_id")


def _load_tokenizer(directory: Path, tokenizer_config: dict[str, Any], ends: Any) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(directory, tokenizer_config, eos_token_ids=ends)
    except (OSError, *_LOAD_ERRORS) as error:
        raise ModelFormatError(
            f"no tokenizer can be loaded from {directory} ({type(error).__name__}: {error}); it "
            "needs tokenizer.json and tokenizer_config.json, or tokenizer.model"
        ) from error
