"""What `load` takes besides a name: adapters, changes of the config, trust, laziness."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_kvcache.models as models
from mlx_kvcache.errors import (
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tests.support.gguf_files import Tiny, write

IDS = mx.array([[5, 90, 17, 200, 33, 8, 61, 140]])
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.1, "keys": ["self_attn.q_proj", "mlp.up_proj"]}


@pytest.fixture
def directory(tmp_path: Path, cache_home: Path) -> Path:
    converted = models.resolve(write(tmp_path / "t.gguf", Tiny("llama")))
    assert converted.parent == cache_home
    return Path(shutil.copytree(converted, tmp_path / "hf"))


def adapter(directory: Path, path: Path, kind: str = "lora", layers: int = 2) -> Path:
    """An adapter with random weights, as mlx-lm's training saves it."""
    model, _ = mlx_lm.utils.load(str(directory))
    linear_to_lora_layers(model, layers, LORA, use_dora=kind == "dora")
    random = np.random.default_rng(0)
    weights = {
        name: mx.array(random.normal(size=value.shape).astype(np.float32) / 8)
        for name, value in tree_flatten(model.parameters())
        if name.rpartition(".")[2] in ("lora_a", "lora_b", "m")
    }
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": LORA}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def logits(model: Any) -> bytes:
    return np.array(model(IDS)).tobytes()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_is_applied_as_mlx_lm_applies_it(
    kind: str, directory: Path, tmp_path: Path
) -> None:
    path = adapter(directory, tmp_path / "adapter", kind)
    model, _ = models.load(directory, adapter_path=path)
    theirs, _ = mlx_lm.utils.load(str(directory), adapter_path=str(path))
    assert logits(model) == logits(theirs)
    assert logits(model) != logits(models.load(directory)[0])
    # No dropout is left on: twice the same.
    assert logits(model) == logits(model)
    assert not model.training


def test_adapters_that_are_not_there(directory: Path, tmp_path: Path) -> None:
    path = adapter(directory, tmp_path / "adapter")

    def refused(kind: type[Exception], word: str) -> None:
        with pytest.raises(kind, match=word):
            models.load(directory, adapter_path=str(path))

    config = (path / "adapter_config.json").read_text()
    (path / "adapter_config.json").write_text("{")
    refused(ModelFormatError, "not valid JSON")
    (path / "adapter_config.json").write_text("[]")
    refused(ModelFormatError, "not a JSON object")
    for changed in ({}, {"num_layers": 2}, {"num_layers": 2, "lora_parameters": {"rank": 4}}):
        (path / "adapter_config.json").write_text(json.dumps(changed))
        refused(ModelFormatError, "does not fit")
    (path / "adapter_config.json").write_text(config)
    whole = (path / "adapters.safetensors").read_bytes()
    (path / "adapters.safetensors").write_bytes(whole[:-8])
    refused(ModelFormatError, "does not fit")
    (path / "adapters.safetensors").rename(path / "adapter_model.safetensors")
    refused(ModelNotFoundError, r"no adapters\.safetensors.*PEFT")
    shutil.rmtree(path)
    refused(ModelNotFoundError, "no adapter directory")


def test_an_adapter_of_another_model(directory: Path, tmp_path: Path) -> None:
    path = adapter(directory, tmp_path / "adapter")
    other = models.resolve(write(tmp_path / "o.gguf", Tiny("qwen3")))
    with pytest.raises(ModelFormatError, match="lora_"):
        models.load(other, adapter_path=path)
    weights = mx.load(str(path / "adapters.safetensors"))
    name = "model.layers.2.self_attn.q_proj.lora_a"
    del weights[name]
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    with pytest.raises(ModelFormatError, match=rf"lacks {name}"):
        models.load(directory, adapter_path=path)


def test_a_missing_adapter_is_said_before_anything_is_converted(
    tmp_path: Path, cache_home: Path
) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    with pytest.raises(ModelNotFoundError, match="adapter"):
        models.load(path, adapter_path=tmp_path / "none")
    assert not cache_home.exists()


def test_changes_of_the_configs(directory: Path) -> None:
    base, tokenizer = models.load(directory)
    assert tokenizer.eos_token == "<|end|>"
    changed, other = models.load(
        directory,
        model_config={"rope_theta": 3.0, "eos_token_id": [7]},
        tokenizer_config={"eos_token": "<unused>"},
    )
    theirs, _ = mlx_lm.utils.load(str(directory), model_config={"rope_theta": 3.0})
    assert logits(changed) == logits(theirs)
    assert logits(changed) != logits(base)
    assert other.eos_token_ids == {3, 7}
    for arguments in ({"model_config": [1]}, {"tokenizer_config": "x"}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            models.load(directory, **arguments)


def test_weights_stay_on_disk_until_they_are_used(directory: Path) -> None:
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    model, _ = models.load(directory, lazy=True, dtype="float32")
    expected = logits(model)
    for lazy in (True, False):
        model, _ = models.load(directory, lazy=lazy)
        # Same size and header, other numbers.
        weights.write_bytes(whole[:-4000] + bytes(4000))
        assert (logits(model) == expected) is not lazy
        weights.write_bytes(whole)


def test_code_of_a_model_runs_only_where_it_is_trusted(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    changed = json.dumps({**config, "model_file": "own.py"})
    (directory / "config.json").write_text(changed)
    (directory / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        models.load(directory)
    model, _ = models.load(directory, trust_remote_code=True)
    (directory / "config.json").write_text(json.dumps(config))
    assert logits(model) == logits(models.load(directory)[0])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_shown_on_a_terminal_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = directory.parent / "models--org--name" / "snapshots" / "0a1b"
    shutil.copytree(directory, snapshot)
    monkeypatch.setenv("TERM", "xterm")
    for stream, place, said in (
        (Terminal(), directory, "Loading hf ..."),
        (Terminal(), snapshot, "Loading org/name ..."),
        (io.StringIO(), directory, ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        models.load(place)
        assert said in stream.getvalue()
        assert bool(stream.getvalue()) is stream.isatty()
