"""One content, one conversion: under any name, at any place, at any time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlx_kvcache.models as models
from mlx_kvcache.errors import ModelFormatError, RoomError
from mlx_kvcache.models import content, convert, room
from mlx_kvcache.models.store import read_source
from tests.support.gguf_files import Tiny, write


def converted(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if not path.name.startswith("."))


def test_a_file_is_converted_again_only_when_its_content_changed(
    cache_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    first = models.resolve(path)
    assert f"Converting t.gguf: 146 kB to {first} ..." in capsys.readouterr().err.splitlines()
    assert read_source(first).sha256 == digest
    assert read_source(first).origin == str(path)
    link, copy = tmp_path / "link.gguf", tmp_path / "other" / "copy.gguf"
    link.symlink_to(path)
    copy.parent.mkdir()
    shutil.copy(path, copy)
    os.utime(path)
    assert {models.resolve(each) for each in (path, link, copy)} == {first}
    path.rename(tmp_path / "moved.gguf")
    assert models.resolve(tmp_path / "moved.gguf") == first
    assert capsys.readouterr() == ("", "")
    # Other content of the same size, with the time that the former one had.
    facts = copy.stat()
    write(copy, Tiny("llama", seed=1))
    os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert copy.stat().st_size == facts.st_size
    second = models.resolve(copy)
    assert converted(cache_home) == sorted([first.name, second.name, content.INDEX])
    weights = [(d / "model.safetensors").read_bytes() for d in (first, second)]
    assert weights[0] != weights[1]


def test_a_known_file_is_not_read_again(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    first = models.resolve(path)
    hashed: list[Path] = []
    own = content._hash

    def counting(path: Path) -> str:
        hashed.append(path)
        return own(path)

    monkeypatch.setattr(content, "_hash", counting)
    assert models.resolve(path) == first
    assert hashed == []
    for broken in ("", "[1]", '{"' + str(path) + '": 7}'):
        (cache_home / content.INDEX).write_text(broken)
        assert models.resolve(path) == first
        assert models.resolve(path) == first
    assert hashed == [path] * 3
    # Writing the index is no condition.
    (cache_home / content.INDEX).unlink()
    (cache_home / content.INDEX).mkdir()
    assert models.resolve(path) == first


def test_the_index_stays_small(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "KEPT", 3)
    for number in range(5):
        path = tmp_path / f"{number}"
        path.write_bytes(b"x" * number)
        content.remember(path, content.content_of(path))
    index = json.loads((cache_home / content.INDEX).read_text())
    assert list(index) == [str(tmp_path / f"{number}") for number in (2, 3, 4)]
    assert index[str(tmp_path / "4")]["sha256"] == hashlib.sha256(b"xxxx").hexdigest()


def test_hashing_a_large_file_is_shown(
    tmp_path: Path,
    cache_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(content, "_SHOWN_BYTES", 1)
    path = tmp_path / "large"
    path.write_bytes(bytes(2_000_000))
    digest = content.content_of(path).sha256
    assert digest == hashlib.sha256(bytes(2_000_000)).hexdigest()
    assert capsys.readouterr().err == "Hashing large (2 MB) ...\n"
    assert not cache_home.exists()


def test_a_file_that_changes_meanwhile_is_not_converted(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    own = convert.write_tokenizer

    def changing(*arguments: object) -> None:
        own(*arguments)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(convert, "write_tokenizer", changing)
    with pytest.raises(ModelFormatError, match="changed while it was read"):
        models.resolve(path)
    assert converted(cache_home) == []


def test_a_full_disk_is_said_before_anything_is_written(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    with pytest.raises(RoomError, match=r"converting t\.gguf needs 67 MB in .*, where 1 kB are"):
        models.resolve(path)
    assert converted(cache_home) == []
