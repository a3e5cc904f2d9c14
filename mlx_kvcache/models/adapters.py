"""LoRA and DoRA adapters, put into a model by mlx-lm's own machinery."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_kvcache.errors import ModelFormatError, ModelNotFoundError
from mlx_kvcache.facts.files import expanded
from mlx_kvcache.facts.json_text import read_json

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapters.safetensors"
#: What mlx-lm calls the parameters of an adapter, at the end of their paths.
_LEAVES = frozenset({"lora_a", "lora_b", "m"})

_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    RuntimeError,
    OSError,
)


def adapter_directory(path: str | Path) -> Path:
    """The directory of an adapter, its files there and its config readable.

    Raises ModelNotFoundError for a directory or a file that is missing, ModelFormatError for a
    config that is no JSON object.
    """
    directory = expanded(path)
    if not directory.is_dir():
        raise ModelNotFoundError(
            f"there is no adapter directory {directory}; pass the one that mlx-lm's fine-tuning "
            "wrote (its --adapter-path)"
        )
    for name in (_CONFIG, _WEIGHTS):
        if not (directory / name).is_file():
            peft = (directory / "adapter_model.safetensors").is_file()
            hint = "; it is PEFT's, of another format than mlx-lm's" if peft else ""
            raise ModelNotFoundError(f"there is no {name} in the adapter {directory}{hint}")
    try:
        config = read_json((directory / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFormatError(f"{directory / _CONFIG} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFormatError(f"{directory / _CONFIG} is not a JSON object")
    return directory


def apply_adapter(model: Module, directory: Path) -> None:
    """Put the adapter into the model, for inference.

    Raises ModelFormatError where it was made for another model, or is damaged; the model is then
    good for nothing.
    """
    from mlx_lm.utils import load_adapters

    try:
        load_adapters(model, str(directory))
        stored = mx.load(str(directory / _WEIGHTS))
    except _ERRORS as error:
        raise ModelFormatError(
            f"the adapter {directory} does not fit the model ({type(error).__name__}: {error}); "
            "it belongs to another model, or a file is damaged"
        ) from error
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(cast("Any", model).parameters()))
    paths = [path for path, _ in parameters]
    # mlx-lm draws what is missing at random.
    missing = [p for p in paths if p.rpartition(".")[2] in _LEAVES and p not in stored]
    if missing:
        raise ModelFormatError(
            f"the adapter {directory} does not fit the model: it lacks {missing[0]} "
            f"and {len(missing) - 1} more of the parameters that its {_CONFIG} announces"
        )
    model.eval()
