"""Load a model and its tokenizer with mlx-lm, from any name that `resolve` takes."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.errors import StrictDataclassError
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from mlx_kvcache.errors import (
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from mlx_kvcache.facts.config import KV_DTYPES
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
    RuntimeError,
    StrictDataclassError,
)


def load(
    name: str | Path,
    *,
    dtype: str | mx.Dtype | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> tuple[Module, Any]:
    """The mlx-lm model and tokenizer of `name`, ready to generate.

    `name` is what `resolve` takes. `dtype` is "float32", "float16" or "bfloat16" (or the mlx
    dtype); None means float32 where the default device is the CPU, on which it is the fast one,
    and the stored dtype on a GPU. Only floating-point parameters are cast, so packed quantized
    weights stay packed. `tokenizer_config` goes to transformers' AutoTokenizer.

    Raises ConfigError for another dtype, ModelNotFoundError for a name that leads nowhere or a
    directory without weights, UnsupportedModelError for a model that mlx-lm does not have,
    ModelFormatError for files that do not fit together.
    """
    chosen = _dtype(dtype)
    directory = resolve(name)
    _check(directory)
    model, ends = _load_model(directory)
    if chosen is not None:
        cast(model, chosen)
    mx.eval([value for _, value in _parameters(model)])
    return model, _load_tokenizer(directory, tokenizer_config, ends)


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


def _check(directory: Path) -> None:
    if "model_type" not in parse_config(directory / "config.json"):
        raise ModelFormatError(f"{directory / 'config.json'} has no 'model_type'")
    if not has_weights(directory):
        raise ModelNotFoundError(
            f"there are no weights (model*.safetensors) in {directory}; the config alone can be "
            "inspected, not run"
        )


def _load_model(directory: Path) -> tuple[Module, Any]:
    """The model, its weights not read yet, and the token ids (or id) that end generation."""
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(directory, lazy=True)
    except _LOAD_ERRORS as error:
        if "supported" in str(error).lower():
            raise UnsupportedModelError(
                f"mlx-lm cannot run the model in {directory}: {error}"
            ) from error
        raise ModelFormatError(
            f"the model in {directory} does not load ({type(error).__name__}: {error}); its "
            "config and weights do not fit together, or a file is damaged"
        ) from error
    return model, config.get("eos_token_id")


def _load_tokenizer(directory: Path, tokenizer_config: dict[str, Any] | None, ends: Any) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(directory, tokenizer_config, eos_token_ids=ends)
    except (OSError, *_LOAD_ERRORS) as error:
        raise ModelFormatError(
            f"no tokenizer can be loaded from {directory} ({type(error).__name__}: {error}); it "
            "needs tokenizer.json and tokenizer_config.json, or tokenizer.model"
        ) from error
