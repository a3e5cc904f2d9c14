"""Files that are no GGUF, are cut short, or hold what is not known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gguf import GGUFWriter

import mlx_kvcache.models as models
from mlx_kvcache.errors import (
    KVCacheError,
    MissingDependencyError,
    ModelFormatError,
    UnsupportedModelError,
)
from mlx_kvcache.models.gguf_file import open_gguf
from tests.support.gguf_files import Tiny, write

pytestmark = pytest.mark.usefixtures("cache_home")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "t.gguf", Tiny("llama")).read_bytes()


@pytest.mark.slow
def test_every_shorter_file_is_refused(whole: bytes, tmp_path: Path, cache_home: Path) -> None:
    path = tmp_path / "cut.gguf"
    lengths = {*range(60), *range(60, len(whole), len(whole) // 97), len(whole) - 1}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            models.resolve(path)
    left = [p.name for p in cache_home.iterdir() if p.suffix != ".lock"]
    assert left == []
    path.write_bytes(whole)
    assert (models.resolve(path) / "model.safetensors").is_file()


def test_damaged_headers_give_typed_errors(whole: bytes, tmp_path: Path) -> None:
    """Any byte of the header turned over: a model, or an error of this package."""
    refused = 0
    for at in range(4, 600, 3):
        path = tmp_path / f"{at}.gguf"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            models.read_config(path)
        except KVCacheError:
            refused += 1
    assert refused > 50


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelFormatError, match="not a GGUF"):
        models.load(path)


def test_unknown_architecture_names_those_supported(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"), architecture="starcoder2")
    with pytest.raises(UnsupportedModelError, match=r"'starcoder2'.*gemma3, llama, qwen2, qwen3"):
        models.resolve(path)


def test_one_part_of_a_split_model(tmp_path: Path) -> None:
    def split(writer: GGUFWriter) -> None:
        writer.add_uint16("split.count", 3)

    with pytest.raises(UnsupportedModelError, match="gguf-split"):
        models.resolve(write(tmp_path / "t.gguf", Tiny("llama"), edit=split))


def test_missing_and_wrong_metadata_is_named(tmp_path: Path) -> None:
    def no_epsilon(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.layer_norm_rms_epsilon"]

    def text_layers(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.block_count"]
        writer.add_string("llama.block_count", "three")

    def no_layers(writer: GGUFWriter) -> None:
        writer.kv_data[0]["llama.block_count"].value = 0

    def many_layers(writer: GGUFWriter) -> None:
        writer.kv_data[0]["gemma3.block_count"].value = 100_001

    for edit, word in (
        (no_epsilon, "layer_norm_rms_epsilon"),
        (text_layers, "should be int"),
        (no_layers, "not positive"),
        (many_layers, "100001, above 100000 layers"),
    ):
        family = "gemma3" if edit is many_layers else "llama"
        path = write(tmp_path / f"{edit.__name__}.gguf", Tiny(family), edit=edit)
        with pytest.raises(ModelFormatError, match=word):
            models.read_config(path)


def test_no_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    assert "token_embd.weight" in open_gguf(path).tensors
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match="pip install 'gguf"):
        models.load(path)
