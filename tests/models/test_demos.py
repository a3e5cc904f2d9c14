"""The demos' way from wheels to a model, with tiny wheels and the real pip."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import mlx_kvcache.models as models
from mlx_kvcache.errors import (
    MissingDependencyError,
    ModelFormatError,
    ModelNotFoundError,
    RoomError,
)
from mlx_kvcache.models import demos
from mlx_kvcache.models.demos import DEMOS, Demo, Wheel, demo_directory
from tests.support.gguf_files import Tiny, write


def wheel(directory: Path, name: str, members: dict[str, bytes]) -> Wheel:
    """A wheel `name` 1.0 that holds `members`, as an index would serve it."""
    info = f"{name}-1.0.dist-info"
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(f"{name}==1.0", path.name, digest)


@pytest.fixture
def demo(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """A tiny demo in two parts, in an index that is a directory."""
    content = write(tmp_path / "t.gguf", Tiny("llama")).read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert not cache_home.exists()
    return Demo(
        name="tiny",
        description="",
        license="",
        download_bytes=1,
        converted_bytes=1,
        wheels=(
            wheel(index, "kv_demo_part1", {"kv/a": content[:5000], "kv/TERMS": b"terms"}),
            wheel(index, "kv_demo_part2", {"kv/b": content[5000:]}),
        ),
        parts=((0, "kv/a"), (1, "kv/b")),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        papers=((0, "kv/TERMS", "TERMS"),),
        notice="terms in {directory}/TERMS",
    )


@pytest.mark.slow
def test_wheels_become_a_model_and_are_not_fetched_again(
    demo: Demo, tmp_path: Path, cache_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = demo_directory(demo)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "Downloading tiny (1 kB) ...",
        "Reading tiny.gguf ...",
        f"Converting tiny.gguf: 146 kB to {directory} ...",
        f"terms in {directory}/TERMS",
    ]
    assert (directory / "TERMS").read_bytes() == b"terms"
    model, _ = models.load(directory)
    assert len(model.layers) == 3
    assert [p.name for p in cache_home.iterdir() if p.suffix != ".lock"] == [directory.name]
    shutil.rmtree(tmp_path / "index")
    assert demo_directory(demo) == directory
    assert capfd.readouterr().err.splitlines() == [f"terms in {directory}/TERMS"]


@pytest.mark.slow
def test_another_file_under_the_same_name_is_refused(demo: Demo, cache_home: Path) -> None:
    first, second = demo.wheels
    for changed, word in (
        (replace(demo, wheels=(first, replace(second, sha256="0" * 64))), "kv_demo_part2"),
        (replace(demo, gguf_sha256="0" * 64), r"tiny\.gguf"),
        (replace(demo, parts=demo.parts[::-1]), r"tiny\.gguf"),
    ):
        with pytest.raises(ModelFormatError, match=f"{word}.*SHA-256"):
            demo_directory(changed)
    assert [p.name for p in cache_home.iterdir() if p.suffix != ".lock"] == []


def test_a_failed_download_says_what_to_do(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "index" / demo.wheels[1].filename).unlink()
    with pytest.raises(ModelNotFoundError, match=r"kv_demo_part2==1\.0(.|\n)*PIP_FIND_LINKS"):
        demo_directory(demo)


def test_no_pip(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        demo_directory(demo)


def test_what_is_missing_is_said_before_anything_is_downloaded(
    demo: Demo, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def downloaded(*_: object) -> None:
        raise AssertionError("it was downloaded")

    monkeypatch.setattr(demos, "fetch", downloaded)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingDependencyError, match="gguf"):
            demo_directory(demo)
    huge = replace(demo, download_bytes=10**18, converted_bytes=10**18)
    with pytest.raises(RoomError, match=r"downloading and converting tiny needs 3000000000\.0 GB"):
        demo_directory(huge)
    with pytest.raises(AssertionError, match="it was downloaded"):
        demo_directory(demo)
    assert [p.name for p in cache_home.iterdir() if p.suffix != ".lock"] == []


def test_the_named_demos() -> None:
    assert [demo.name for demo in models.available()] == ["smollm2", "gemma3-270m"] == list(DEMOS)
    for demo in models.available():
        assert all(len(wheel.sha256) == 64 for wheel in demo.wheels)
        assert all(0 <= index < len(demo.wheels) for index, *_ in (*demo.parts, *demo.papers))
    gemma = DEMOS["gemma3-270m"]
    assert "Gemma Terms of Use" in gemma.notice
    assert "GEMMA_TERMS.html" in gemma.notice
