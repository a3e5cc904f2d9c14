"""Names, paths and ids: what each leads to, and what is said when it leads nowhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2
import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import errors as hub_errors
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

import mlx_kvcache.models as models
from mlx_kvcache.errors import (
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tests.support.gguf_files import Tiny, write

pytestmark = pytest.mark.usefixtures("cache_home")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory of a tiny model."""
    converted = models.resolve(write(tmp_path / "t.gguf", Tiny("llama")))
    return Path(shutil.copytree(converted, tmp_path / "hf"))


def dtypes(model: object) -> set[mx.Dtype]:
    return {value.dtype for _, value in tree_flatten(model.parameters())}  # type: ignore[attr-defined]


def test_a_directory_its_config_and_a_string_path(directory: Path) -> None:
    assert models.resolve(directory) == models.resolve(str(directory)) == directory
    assert models.resolve(directory / "config.json") == directory
    assert models.read_config(directory / "config.json")["model_type"] == "llama"
    other = directory / "renamed.json"
    shutil.copy(directory / "config.json", other)
    assert models.read_config(other) == models.read_config(directory)
    model, tokenizer = models.load(str(directory))
    assert len(model.layers) == 3
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_a_config_alone_can_be_read_not_loaded(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert models.resolve(directory) == directory
    assert models.read_config(directory)["num_hidden_layers"] == 3
    with pytest.raises(ModelNotFoundError, match="no weights"):
        models.load(directory)


def test_directories_that_are_not_models(directory: Path, tmp_path: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        models.load(directory)
    with pytest.raises(ModelNotFoundError, match=r"t\.gguf"):
        models.load(tmp_path)
    (directory / "config.json").write_text("{ not json")
    with pytest.raises(ModelFormatError, match="not valid JSON"):
        models.load(directory)
    (directory / "config.json").write_text("[1]")
    with pytest.raises(ModelFormatError, match="list"):
        models.read_config(directory)
    (directory / "config.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="model_type"):
        models.load(directory)
    (directory / "notes.txt").write_text("x")
    with pytest.raises(ModelFormatError, match=r"notes\.txt"):
        models.resolve(directory / "notes.txt")


def test_models_that_do_not_load(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())

    def changed(**fields: object) -> None:
        (directory / "config.json").write_text(json.dumps({**config, **fields}))

    changed(model_type="not_a_family")
    with pytest.raises(UnsupportedModelError, match="not_a_family"):
        models.load(directory)
    changed(num_hidden_layers=4)
    with pytest.raises(ModelFormatError, match=r"layers\.3"):
        models.load(directory)
    changed(intermediate_size=65)
    with pytest.raises(ModelFormatError, match="65"):
        models.load(directory)
    changed()
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError):
            models.load(directory)
    weights.write_bytes(whole)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="tokenizer"):
        models.load(directory)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    for name, words in (
        ("smolm2", "did you mean 'smollm2'"),
        ("Gemma3-270M", "did you mean 'gemma3-270m'"),
        ("zzzz", "smollm2, gemma3-270m"),
        ("./nothing", "no file or directory"),
        (str(tmp_path / "x.gguf"), "no file or directory"),
        ("a/b/c", "no file or directory"),
        ("", "no model is named ''"),
    ):
        for call in (models.resolve, models.read_config, models.load):
            with pytest.raises(ModelNotFoundError, match=words):
                call(name)


def http_error(kind: type[hub_errors.HfHubHTTPError], status: int) -> Exception:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/org/model")
    return kind("Repository Not Found", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    "error",
    [
        http_error(hub_errors.RepositoryNotFoundError, 401),
        http_error(hub_errors.HfHubHTTPError, 503),
        hub_errors.LocalEntryNotFoundError("offline"),
        hub_errors.HFValidationError("bad id"),
        httpx2.ConnectError("no route"),
        ConnectionError("refused"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_hub_failures_say_what_was_tried(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for call in (models.resolve, models.read_config, models.load):
        with pytest.raises(ModelNotFoundError, match=r"'org/model'.*HF_HUB_OFFLINE.*'smollm2'"):
            call("org/model")


def test_offline_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub itself, told to stay off the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="nobody/nothing"):
        models.load("nobody/nothing")


def test_a_hub_model_is_loaded_from_where_it_was_put(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool, str | None]] = []

    def snapshot(
        identifier: str, allow_patterns: list[str], revision: str | None, tqdm_class: object
    ) -> str:
        assert tqdm_class is not None
        asked.append((identifier, "model*.safetensors" in allow_patterns, revision))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert models.read_config("org/model")["model_type"] == "llama"
    assert len(models.load("org/model")[0].layers) == 3
    assert asked == [("org/model", False, None), ("org/model", True, None)]
    models.read_config("org/model", revision="v2")
    models.load("org/model", revision="main")
    assert asked[2:] == [("org/model", False, "v2"), ("org/model", True, "main")]
    for name in (str(directory), "smollm2"):
        for call in (models.resolve, models.read_config, models.load):
            with pytest.raises(ConfigError, match="no revision 'v2'"):
                call(name, revision="v2")
    (directory / "config.json").unlink()
    for call in (models.read_config, models.load):
        with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
            call("org/model")


def test_dtypes(directory: Path) -> None:
    for name, dtype in (
        ("float32", mx.float32),
        ("float16", mx.float16),
        ("bfloat16", mx.bfloat16),
        (mx.bfloat16, mx.bfloat16),
    ):
        assert dtypes(models.load(directory, dtype=name)[0]) == {dtype}
    for wrong in ("int8", "fp16", mx.int32, 16):
        with pytest.raises(ConfigError, match="float32, float16, bfloat16"):
            models.load(directory, dtype=wrong)


@pytest.mark.skipif(mx.metal.is_available(), reason="the default device is the GPU")
def test_the_cpu_computes_in_float32(directory: Path) -> None:
    half, _ = models.load(directory, dtype="float16")
    save_model(directory, half)
    assert dtypes(models.load(directory)[0]) == {mx.float32}


def test_packed_weights_stay_packed(directory: Path) -> None:
    model, _ = models.load(directory)
    config = models.read_config(directory)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(directory, model)
    save_config(config, directory / "config.json")
    ids = mx.array([[5, 90, 17]])
    expected = model(ids)
    loaded, _ = models.load(directory, dtype="float16")
    linear = loaded.layers[0].self_attn.q_proj
    assert (linear.weight.dtype, linear.scales.dtype) == (mx.uint32, mx.float16)
    assert mx.array_equal(linear.weight, model.layers[0].self_attn.q_proj.weight)
    loaded, _ = models.load(directory, dtype="float32")
    assert loaded.layers[0].self_attn.q_proj.weight.dtype == mx.uint32
    assert mx.array_equal(loaded(ids), expected).item()
