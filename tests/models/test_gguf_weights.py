"""GGUF to Hugging Face and back: the same weights, bit for bit, and the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize

import mlx_kvcache.models as models
from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.models.convert import convert
from mlx_kvcache.models.gguf_rope import FREQUENCY_FACTORS
from tests.support.gguf_files import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Tiny,
    stored,
    write,
)

IDS = [5, 90, 17, 200, 33, 8, 61, 140]


def converted(directory: Path) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        weights |= {k: np.array(v.astype(mx.float32)) for k, v in mx.load(str(path)).items()}
    return weights


def into(path: Path, **options: int) -> Path:
    directory = path.with_suffix("")
    directory.mkdir()
    convert(path, directory, **options)
    return directory


@pytest.mark.usefixtures("cache_home")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_logits_survive(family: str, tied: bool, tmp_path: Path) -> None:
    tiny = Tiny(family, tied=tied)
    path = write(tmp_path / "tiny.gguf", tiny)
    weights = converted(models.resolve(path))
    assert weights.keys() == tiny.weights.keys()
    for name, values in tiny.weights.items():
        assert weights[name].tobytes() == values.tobytes(), name
    model, _ = models.load(path, dtype="float32")
    loaded = np.array(model(mx.array([IDS])))
    assert loaded.tobytes() == tiny.logits(IDS).tobytes()
    assert loaded.tobytes() != tiny.logits([*IDS[:-1], IDS[-1] + 1]).tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_changed_value_is_seen(family: str, tmp_path: Path) -> None:
    tiny = Tiny(family)
    tensors = stored(tiny)
    tensors["blk.1.ffn_up.weight"][3, 4] += 1 / 256
    weights = converted(into(write(tmp_path / "t.gguf", tiny, tensors)))
    differing = {k for k, v in tiny.weights.items() if weights[k].tobytes() != v.tobytes()}
    assert differing == {"model.layers.1.mlp.up_proj.weight"}


def test_llama_rows_are_put_back_per_head(tmp_path: Path) -> None:
    """A file whose rows were never interleaved comes out wrong: the restore does something."""
    tiny = Tiny("llama", options={"attention_bias": True})
    tensors = stored(tiny)
    for projection, heads in (("q", HEADS), ("k", KV_HEADS)):
        name = f"model.layers.0.self_attn.{projection}_proj"
        tensors[f"blk.0.attn_{projection}.weight"] = tiny.weights[f"{name}.weight"]
        head_dim = HEAD_DIM["llama"]
        assert tiny.weights[f"{name}.weight"].shape[0] == heads * head_dim
    weights = converted(into(write(tmp_path / "t.gguf", tiny, tensors)))
    for projection in "qk":
        name = f"model.layers.0.self_attn.{projection}_proj"
        assert weights[f"{name}.weight"].tobytes() != tiny.weights[f"{name}.weight"].tobytes()
        # The bias was interleaved like its rows, and comes back.
        assert weights[f"{name}.bias"].tobytes() == tiny.weights[f"{name}.bias"].tobytes()


def test_quantized_blocks_become_bfloat16_of_their_values(tmp_path: Path) -> None:
    tiny = Tiny("llama")
    path = write(tmp_path / "t.gguf", tiny, kind=GGMLQuantizationType.Q8_0)
    directory = into(path)
    weights = mx.load(str(directory / "model.safetensors"))
    name = "model.layers.2.mlp.down_proj.weight"
    # A Q8_0 block is a float16 scale and 32 int8 codes.
    blocks = quantize(tiny.weights[name], GGMLQuantizationType.Q8_0).reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (blocks[:, 2:].view(np.int8) * scales).reshape(weights[name].shape)
    assert weights[name].dtype == mx.bfloat16
    assert mx.array_equal(weights[name], mx.array(expected).astype(mx.bfloat16)).item()
    assert not mx.array_equal(weights[name], mx.array(tiny.weights[name]).astype(mx.bfloat16))
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F16, mx.float16),
        (GGMLQuantizationType.BF16, mx.bfloat16),
        (GGMLQuantizationType.F32, mx.float32),
    ],
)
def test_plain_types_are_kept(kind: GGMLQuantizationType, dtype: mx.Dtype, tmp_path: Path) -> None:
    tiny = Tiny("qwen3")
    directory = into(write(tmp_path / "t.gguf", tiny, kind=kind))
    loaded = mx.load(str(directory / "model.safetensors"))
    assert {v.dtype for v in loaded.values()} == {dtype}
    # Multiples of 1/256 below 1/4 are exact in all three.
    for name, values in converted(directory).items():
        assert values.tobytes() == tiny.weights[name].tobytes(), name


def test_shards_hold_the_same_weights(tmp_path: Path) -> None:
    tiny = Tiny("qwen2")
    directory = into(write(tmp_path / "t.gguf", tiny), shard_bytes=20_000)
    names = sorted(p.name for p in directory.glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    assert index["weight_map"].keys() == tiny.weights.keys()
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tiny.weights.values())
    for name, values in converted(directory).items():
        assert values.tobytes() == tiny.weights[name].tobytes(), name
    model, _ = models.load(directory)
    assert np.array(model(mx.array([IDS]))).tobytes() == tiny.logits(IDS).tobytes()


def test_config_facts(tmp_path: Path, cache_home: Path) -> None:
    config = models.read_config(write(tmp_path / "t.gguf", Tiny("gemma3")))
    assert config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (4, 3)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (16, 16)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert not cache_home.exists()
    untied = models.read_config(write(tmp_path / "u.gguf", Tiny("gemma3", tied=False)))
    assert untied["tie_word_embeddings"] is False


def test_gemma_pattern_as_a_list(tmp_path: Path) -> None:
    tiny = Tiny("gemma3")
    key = "gemma3.attention.sliding_window_pattern"

    def pattern(values: list[bool]):
        def edit(writer: GGUFWriter) -> None:
            del writer.kv_data[0][key]
            writer.add_array(key, values)

        return edit

    path = write(tmp_path / "a.gguf", tiny, edit=pattern([True, False, True]))
    assert models.read_config(path)["sliding_window_pattern"] == 2
    uneven = write(tmp_path / "b.gguf", tiny, edit=pattern([False, True, False]))
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern"):
        models.read_config(uneven)

    def absent(writer: GGUFWriter) -> None:
        del writer.kv_data[0][key]

    assert (
        models.read_config(write(tmp_path / "c.gguf", tiny, edit=absent))["sliding_window_pattern"]
        == 6
    )


def test_rope_scaling_kinds(tmp_path: Path) -> None:
    tiny = Tiny("llama")
    plain = models.read_config(write(tmp_path / "p.gguf", tiny))
    assert "rope_scaling" not in plain

    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def longrope(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)

    config = models.read_config(write(tmp_path / "l.gguf", tiny, edit=linear))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    config = models.read_config(write(tmp_path / "y.gguf", tiny, edit=yarn))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(UnsupportedModelError, match="longrope"):
        models.read_config(write(tmp_path / "x.gguf", tiny, edit=longrope))


def llama3_factors(factor: float) -> np.ndarray:
    """Llama 3.1's published rule, one frequency at a time."""
    size = HEAD_DIM["llama"]
    out = []
    for i in range(size // 2):
        wavelength = 2 * np.pi * 5e5 ** (2 * i / size)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.usefixtures("cache_home")
def test_llama3_rope_is_recognized_and_gives_the_same_logits(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tiny = Tiny("llama", options={"rope_scaling": scaling})
    tensors = {FREQUENCY_FACTORS: llama3_factors(32.0), **stored(tiny)}
    path = write(tmp_path / "t.gguf", tiny, tensors)
    assert models.read_config(path)["rope_scaling"] == scaling
    model, _ = models.load(path, dtype="float32")
    logits = np.array(model(mx.array([IDS])))
    assert logits.tobytes() == tiny.logits(IDS).tobytes()
    assert logits.tobytes() != Tiny("llama").logits(IDS).tobytes()

    tensors[FREQUENCY_FACTORS] = tensors[FREQUENCY_FACTORS] * np.float32([1, 1, 1.01, 1])
    with pytest.raises(UnsupportedModelError, match="Llama 3"):
        models.read_config(write(tmp_path / "odd.gguf", tiny, tensors))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tiny = Tiny("llama")
    for name in ("blk.2.attn_k.weight", "output_norm.weight"):
        tensors = stored(tiny)
        del tensors[name]
        with pytest.raises(ModelFormatError, match=name):
            into(write(tmp_path / f"{name}.gguf", tiny, tensors))
    tensors = stored(tiny)
    tensors["blk.1.ffn_gate.weight"] = tensors["blk.1.ffn_gate.weight"][:-1]
    with pytest.raises(ModelFormatError, match=r"ffn_gate.*\(63, 32\).*\(64, 32\)"):
        into(write(tmp_path / "shape.gguf", tiny, tensors))
    tensors = stored(tiny)
    tensors["blk.0.attn_q.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_k\.bias"):
        into(write(tmp_path / "bias.gguf", tiny, tensors))
    tensors = stored(tiny)
    tensors["blk.0.surprise.weight"] = np.zeros(32, np.float32)
    with pytest.raises(UnsupportedModelError, match="surprise"):
        into(write(tmp_path / "extra.gguf", tiny, tensors))


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tiny = Tiny("qwen3")
    tensors = stored(tiny)
    tensors["blk.1.attn_v.weight"][0, 0] = np.nan
    with pytest.raises(ModelFormatError, match=r"blk.1.attn_v.weight.*finite"):
        into(write(tmp_path / "t.gguf", tiny, tensors))
    assert not (tmp_path / "t" / "config.json").exists()


def test_models_that_mlx_lm_lacks_are_refused(tmp_path: Path) -> None:
    def experts(writer: GGUFWriter) -> None:
        writer.add_expert_count(8)

    def partial_rotary(writer: GGUFWriter) -> None:
        writer.add_rope_dimension_count(4)

    def uneven_heads(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv([2, 1, 2])

    tiny = Tiny("llama")
    for edit, word in (
        (experts, "8 experts"),
        (partial_rotary, "dimension_count"),
        (uneven_heads, "head_count_kv"),
    ):
        with pytest.raises(UnsupportedModelError, match=word):
            models.read_config(write(tmp_path / f"{edit.__name__}.gguf", tiny, edit=edit))


def test_the_tiny_models_have_the_layers_the_tests_assume() -> None:
    assert all(len(Tiny(family).model.layers) == LAYERS for family in FAMILIES)
