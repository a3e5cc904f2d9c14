"""A GGUF file made into an ordinary Hugging Face directory that mlx-lm loads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kvcache.errors import ModelFormatError
from mlx_kvcache.models.content import check_unchanged, content_of, remember
from mlx_kvcache.models.gguf_config import architecture, config_from
from mlx_kvcache.models.gguf_file import GGUFFile, open_gguf
from mlx_kvcache.models.gguf_packed import GROUP_SIZE, Packing, packed_weights, packing
from mlx_kvcache.models.gguf_tokenizer import write_tokenizer
from mlx_kvcache.models.gguf_weights import Parameter, parameters
from mlx_kvcache.models.progress import showing, size_text
from mlx_kvcache.models.room import check_room
from mlx_kvcache.models.store import Source, Workspace, build_once, write_json, write_source

# Part of every directory name: raise it whenever the same file would convert differently.
CONVERTER = 2

SHARD_BYTES = 4 << 30

#: Of the tokenizer and the configs, beside the weights.
_PAPER_BYTES = 64 << 20

_PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A parameter and the form in which it is kept: packed, or of a dtype."""

    parameter: Parameter
    form: Packing | mx.Dtype

    @property
    def names(self) -> list[str]:
        """The names of its arrays."""
        if isinstance(self.form, Packing):
            stem = self.parameter.target.removesuffix(".weight")
            return [f"{stem}.{kind}" for kind in ("weight", "scales", "biases")]
        return [self.parameter.target]

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        count = math.prod(self.parameter.shape)
        if isinstance(self.form, Packing):
            return self.form.nbytes(count)
        return count * self.form.size


def keeps_packed() -> bool:
    """Whether quantized weights stay packed, where MLX can hold them so.

    On a GPU they are read faster than floats; on a CPU MLX multiplies packed weights 5 to 28
    times slower.
    """
    return mx.default_device().type != mx.DeviceType.cpu


def entry_suffix(packed: bool) -> str:
    """What a converted directory's name ends with: other converters and forms are other models."""
    return f"v{CONVERTER}-packed" if packed else f"v{CONVERTER}"


def convert_cached(path: Path) -> Path:
    """The converted model of the file at `path`, made once and kept in the cache directory.

    The directory is named after the file's content, so a file that is moved, copied or touched
    is not converted again, and a changed one is. Raises ModelFormatError when the file changes
    while it is read, and what `convert` raises.
    """
    real = path.resolve()
    content = content_of(real)
    digest = content.sha256
    packed = keeps_packed()

    def build(workspace: Workspace) -> None:
        convert(real, workspace.model, packed=packed, place=workspace.final)
        check_unchanged(real, content)
        write_source(workspace.model, Source(path.stem, str(real), digest))

    directory = build_once(f"gguf-{digest[:16]}-{entry_suffix(packed)}", build)
    remember(real, content)
    return directory


def convert(
    path: Path,
    directory: Path,
    *,
    packed: bool = False,
    place: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model in the GGUF file at `path` into the existing, empty `directory`.

    Everything is checked before the first weight is written. packed: keep the blocks that MLX can
    hold; other weights keep the file's type where all matrices share F32, F16 or BF16, which loses
    nothing (see `storage_dtype` for the rest). place: where the directory will be, for what is
    said. Raises RoomError, and what `open_gguf`, `config_from`, `parameters` and `tokenizer_from`
    raise.
    """
    with showing(f"Reading {path.name}"):
        file = open_gguf(path)
        name = architecture(file)
        config = config_from(file)
        plan = parameters(file, config)
        dtype = storage_dtype(file, plan)
        stored = [Stored(p, (packed and packing(file, p)) or dtype) for p in plan]
        total = sum(each.nbytes for each in stored)
        check_room(directory, total + _PAPER_BYTES, f"converting {path.name}")
        write_tokenizer(file, name, directory)
    said = f"Converting {path.name}: {size_text(total)} to {place or directory}"
    with showing(said, total=len(plan), keep=True) as advance:
        shards = _shards(stored, shard_bytes)
        for index, shard in enumerate(shards, start=1):
            weights: dict[str, mx.array] = {}
            for each in shard:
                weights |= _weights(file, each)
                advance()
            _save(directory, weights, index, len(shards))
    if len(shards) > 1:
        _write_index(directory, shards)
    config |= _quantization(stored)
    config["torch_dtype"] = _name(dtype)
    write_json(directory / "config.json", config)


def storage_dtype(file: GGUFFile, plan: list[Parameter]) -> mx.Dtype:
    """The dtype in which the weights that are not packed are kept.

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


def _weights(file: GGUFFile, stored: Stored) -> dict[str, mx.array]:
    parameter, form = stored.parameter, stored.form
    if isinstance(form, Packing):
        weights = packed_weights(file, parameter, form)
        kept = "float16"
    else:
        weights = {parameter.target: mx.array(parameter.read(file)).astype(form)}
        kept = _name(form)
    finite = mx.all(mx.stack([mx.all(mx.isfinite(each)) for each in weights.values()]))
    mx.eval(finite, *weights.values())
    if not finite.item():
        raise ModelFormatError(
            f"{file.path.name}: tensor {parameter.source!r} has values that are not finite "
            f"numbers in {kept}; the file is damaged"
        )
    return weights


def _quantization(stored: list[Stored]) -> dict[str, Any]:
    """What mlx-lm reads of packed weights: their form, and layer by layer where it is another."""
    bits = {
        each.parameter.target.removesuffix(".weight"): each.form.bits
        for each in stored
        if isinstance(each.form, Packing)
    }
    if not bits:
        return {}
    usual = min(bits.values())
    form: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual}
    others = {n: {"group_size": GROUP_SIZE, "bits": b} for n, b in bits.items() if b != usual}
    return {"quantization": {**form, **others}}


def _shards(stored: list[Stored], shard_bytes: int) -> list[list[Stored]]:
    """`stored` cut, in order, into parts of at most `shard_bytes` (or one parameter)."""
    shards: list[list[Stored]] = [[]]
    used = 0
    for each in stored:
        if shards[-1] and used + each.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(each)
        used += each.nbytes
    return shards


def _save(directory: Path, weights: dict[str, mx.array], index: int, count: int) -> None:
    path = directory / _shard_name(index, count)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors"


def _write_index(directory: Path, shards: list[list[Stored]]) -> None:
    def named() -> Iterator[tuple[str, str]]:
        for index, shard in enumerate(shards, start=1):
            for each in shard:
                yield from ((name, _shard_name(index, len(shards))) for name in each.names)

    total = sum(each.nbytes for shard in shards for each in shard)
    content = {"metadata": {"total_size": total}, "weight_map": dict(named())}
    write_json(directory / "model.safetensors.index.json", content)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
