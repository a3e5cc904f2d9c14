"""Blocks that MLX can hold stay packed: the numbers of the file, and nearly the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

import mlx_kvcache.models as models
from mlx_kvcache.errors import ModelFormatError
from mlx_kvcache.models import convert as conversion
from mlx_kvcache.models import loading
from mlx_kvcache.models.convert import convert
from tests.support.gguf_files import (
    FAMILIES,
    Tiny,
    byte_tokenizer,
    gguf_name,
    model_metadata,
    permuted,
    stored,
    write,
)

IDS = mx.array([[5, 90, 17, 200, 33, 8, 61, 140]])
BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert as on a GPU."""
    monkeypatch.setattr(conversion, "keeps_packed", lambda: True)


def file_values(tiny: Tiny, name: str, kind: Kind) -> np.ndarray:
    """What the gguf package reads of a matrix, its rows put back as the model has them."""
    values = stored(tiny)[gguf_name(tiny.family, name)]
    read = dequantize(quantize(values, kind), kind)
    if tiny.family == "llama" and (".q_proj." in name or ".k_proj." in name):
        # The permutation that puts row numbers, permuted, back into order.
        heads = 4 if ".q_proj." in name else 2
        order = permuted(np.arange(len(read)), heads)
        back = np.empty_like(read)
        back[order] = read
        return back
    return read


@pytest.mark.usefixtures("packing", "cache_home")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_the_numbers_of_the_file(
    family: str, kind: Kind, tmp_path: Path
) -> None:
    tiny = Tiny(family)
    directory = models.resolve(write(tmp_path / "t.gguf", tiny, kind=kind))
    assert directory.name.endswith("-packed")
    weights = mx.load(str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": BITS[kind]}
    matrices = [name for name, values in tiny.weights.items() if values.ndim == 2]
    for name in matrices:
        stem = name.removesuffix(".weight")
        parts = [weights[f"{stem}.{part}"] for part in ("weight", "scales", "biases")]
        assert [part.dtype for part in parts] == [mx.uint32, mx.float16, mx.float16]
        parts[1:] = [part.astype(mx.float32) for part in parts[1:]]
        mine = mx.dequantize(*parts, group_size=32, bits=BITS[kind])
        # A scale times code zero has the scale's sign in the file; a sum has one zero.
        expected = file_values(tiny, name, kind) + np.float32(0)
        assert np.array(mine).tobytes() == expected.tobytes(), name
    vectors = set(tiny.weights) - set(matrices)
    assert len(weights) == 3 * len(matrices) + len(vectors)
    assert {weights[name].dtype for name in vectors} == {mx.bfloat16}


@pytest.mark.usefixtures("cache_home")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_the_float_conversion(
    family: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.gguf", Tiny(family), kind=kind)
    other = write(tmp_path / "o.gguf", Tiny(family, seed=1), kind=kind)

    def logits(path: Path) -> tuple[Any, np.ndarray]:
        model, _ = models.load(path, dtype="float32")
        return model, np.array(model(IDS))

    plain, expected = logits(path)
    monkeypatch.setattr(conversion, "keeps_packed", lambda: True)
    packed, mine = logits(path)
    names = {name for name, _ in tree_flatten(packed.parameters())}
    assert "model.layers.0.mlp.up_proj.scales" in names
    assert "model.embed_tokens.scales" in names
    assert "model.layers.0.mlp.up_proj.scales" not in dict(tree_flatten(plain.parameters()))
    # The float one rounds its weights to bfloat16: 2**-9 of each.
    scale = np.abs(expected).max()
    assert np.abs(mine - expected).max() < 0.02 * scale
    assert np.abs(logits(other)[1] - expected).max() > 0.2 * scale


@pytest.mark.usefixtures("packing", "cache_home")
def test_kinds_that_mlx_cannot_hold_become_floats_beside_packed_ones(tmp_path: Path) -> None:
    """As in a file of mixed types: each matrix in the form that holds it."""
    tiny = Tiny("llama")
    kinds = {"blk.1.ffn_up.weight": Kind.Q8_0, "blk.1.ffn_gate.weight": Kind.Q5_0}
    path = mixed(tmp_path / "t.gguf", tiny, kinds, Kind.Q4_0)
    directory = models.resolve(path)
    config = json.loads((directory / "config.json").read_text())
    up = "model.layers.1.mlp.up_proj"
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        up: {"group_size": 32, "bits": 8},
    }
    model, _ = models.load(directory)
    first, second = (model.layers[index].mlp for index in (0, 1))
    assert (first.up_proj.bits, second.up_proj.bits) == (4, 8)
    assert not hasattr(second.gate_proj, "bits")
    gate = file_values(tiny, "model.layers.1.mlp.gate_proj.weight", Kind.Q5_0)
    rounded = mx.array(gate).astype(mx.bfloat16).astype(mx.float32)
    assert mx.array_equal(second.gate_proj.weight, rounded).item()


def mixed(path: Path, tiny: Tiny, kinds: dict[str, Kind], rest: Kind) -> Path:
    writer = GGUFWriter(path, tiny.family)
    model_metadata(writer, tiny)
    byte_tokenizer(writer)
    for name, values in stored(tiny).items():
        if values.ndim < 2:
            writer.add_tensor(name, values)
        else:
            kind = kinds.get(name, rest)
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_shards_and_their_index(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", Tiny("qwen2"), kind=Kind.Q4_1)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for directory, size in ((whole, 1 << 30), (cut, 10_000)):
        directory.mkdir()
        convert(path, directory, packed=True, shard_bytes=size)
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    expected = mx.load(str(whole / "model.safetensors"))
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert len(set(index["weight_map"].values())) > 2
    for name, shard in index["weight_map"].items():
        assert mx.array_equal(mx.load(str(cut / shard))[name], expected[name]).item()


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", Tiny("qwen3"), kind=Kind.Q8_0)
    data = path.read_bytes()
    blocks = quantize(stored(Tiny("qwen3"))["blk.1.attn_v.weight"], Kind.Q8_0).tobytes()
    at = data.index(blocks)
    path.write_bytes(data[:at] + np.float16(np.inf).tobytes() + data[at + 2 :])
    directory = tmp_path / "out"
    directory.mkdir()
    with pytest.raises(ModelFormatError, match=r"blk.1.attn_v.weight.*finite"):
        convert(path, directory, packed=True)


@pytest.mark.usefixtures("cache_home")
def test_floats_and_packed_weights_are_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"), kind=Kind.Q4_0)
    plain = models.resolve(path)
    assert "quantization" not in json.loads((plain / "config.json").read_text())
    monkeypatch.setattr(conversion, "keeps_packed", lambda: True)
    packed = models.resolve(path)
    assert packed.name == f"{plain.name}-packed"
    sizes = [(d / "model.safetensors").stat().st_size for d in (plain, packed)]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.skipif(mx.metal.is_available(), reason="the default device is the GPU")
def test_a_cpu_keeps_floats() -> None:
    assert not conversion.keeps_packed()


@pytest.mark.usefixtures("packing", "cache_home")
def test_a_gpu_computes_in_one_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asked for by the config, since the scales are float16 and the rest is not."""
    directory = models.resolve(write(tmp_path / "t.gguf", Tiny("gemma3"), kind=Kind.Q8_0))

    class Gpu:
        type = "gpu"

    monkeypatch.setattr(loading.mx, "default_device", lambda: Gpu())
    model, _ = models.load(directory)
    dtypes = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert dtypes == {mx.uint32, mx.bfloat16}
