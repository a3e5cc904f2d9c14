"""A GGUF file made into an ordinary Hugging Face directory that mlx-lm loads."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import mlx.core as mx

from mlx_kvcache.errors import ModelFormatError
from mlx_kvcache.models.gguf_config import architecture, config_from
from mlx_kvcache.models.gguf_file import GGUFFile, open_gguf
from mlx_kvcache.models.gguf_tokenizer import write_tokenizer
from mlx_kvcache.models.gguf_weights import Parameter, parameters
from mlx_kvcache.models.progress import showing
from mlx_kvcache.models.store import Workspace, build_once, write_json

# Part of every directory name: raise it whenever the same file would convert differently.
CONVERTER = 2

SHARD_BYTES = 4 << 30

_PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def convert_cached(path: Path) -> Path:
    """The converted model of the file at `path`, made once and kept in the cache directory.

    The directory is named after the file's real path, size and time of change (hashing the
    content of a large model would cost more than loading it), so a changed file is converted
    anew and a moved one too.
    """
    real = path.resolve()
    facts = real.stat()
    key = f"{CONVERTER}:{real}:{facts.st_size}:{facts.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", real.stem)[:60]

    def build(workspace: Workspace) -> None:
        convert(real, workspace.model)

    return build_once(f"gguf-{stem}-{digest}", build)


def convert(path: Path, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in the GGUF file at `path` into the existing, empty `directory`.

    Everything is checked before the first weight is written. Weights keep the file's type where
    all matrices share F32, F16 or BF16, which loses nothing; see `storage_dtype` for the rest.
    Raises what `open_gguf`, `config_from`, `parameters` and `tokenizer_from` raise.
    """
    with showing(f"Reading {path.name}"):
        file = open_gguf(path)
        name = architecture(file)
        config = config_from(file)
        plan = parameters(file, config)
        dtype = storage_dtype(file, plan)
        write_tokenizer(file, name, directory)
    with showing(f"Converting {path.name}", total=len(plan)) as advance:
        shards = _shards(plan, dtype.size, shard_bytes)
        for index, shard in enumerate(shards, start=1):
            weights = {}
            for parameter in shard:
                weights[parameter.target] = _weight(file, parameter, dtype)
                advance()
            _save(directory, weights, index, len(shards))
    if len(shards) > 1:
        _write_index(directory, shards, dtype.size)
    config["torch_dtype"] = _name(dtype)
    write_json(directory / "config.json", config)


def storage_dtype(file: GGUFFile, plan: list[Parameter]) -> mx.Dtype:
    """The dtype in which the converted weights are kept.

    Files whose matrices are all F32, all F16 or all BF16 keep that type. Quantized ones are kept
    as bfloat16, half the disk and memory of float32: all four architectures were trained in it,
    and float16 would keep three bits more of each weight but overflows in the activations of
    Gemma 3 and Qwen 2 on a GPU, where the stored dtype is also the one computed in. Rounding
    changes a weight by at most 2**-8 of itself, a few percent of a 4-bit quantization step: on
    both demos the KL divergence from the unrounded model is 6e-5 nats a token.
    """
    kinds = {file.tensors[p.source].type_name for p in plan if len(p.shape) > 1}
    if len(kinds) == 1:
        return _PLAIN.get(kinds.pop(), mx.bfloat16)
    return mx.bfloat16


def _weight(file: GGUFFile, parameter: Parameter, dtype: mx.Dtype) -> mx.array:
    weight = mx.array(parameter.read(file)).astype(dtype)
    finite = mx.all(mx.isfinite(weight))
    mx.eval(weight, finite)
    if not finite.item():
        raise ModelFormatError(
            f"{file.path.name}: tensor {parameter.source!r} has values that are not finite "
            f"numbers in {_name(dtype)}; the file is damaged"
        )
    return weight


def _shards(plan: list[Parameter], item_bytes: int, shard_bytes: int) -> list[list[Parameter]]:
    """`plan` cut, in order, into parts of at most `shard_bytes` (or one parameter)."""
    shards: list[list[Parameter]] = [[]]
    used = 0
    for parameter in plan:
        size = _bytes(parameter, item_bytes)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(parameter)
        used += size
    return shards


def _bytes(parameter: Parameter, item_bytes: int) -> int:
    return math.prod(parameter.shape, start=item_bytes)


def _save(directory: Path, weights: dict[str, mx.array], index: int, count: int) -> None:
    path = directory / _shard_name(index, count)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors"


def _write_index(directory: Path, shards: list[list[Parameter]], item_bytes: int) -> None:
    names = {
        parameter.target: _shard_name(index, len(shards))
        for index, shard in enumerate(shards, start=1)
        for parameter in shard
    }
    total = sum(_bytes(parameter, item_bytes) for shard in shards for parameter in shard)
    content = {"metadata": {"total_size": total}, "weight_map": names}
    write_json(directory / "model.safetensors.index.json", content)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
