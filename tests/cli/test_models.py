"""`models`: what is listed is what is on the disk; what is deleted was meant, and nobody's work."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from filelock import FileLock

import mlx_kvcache.models as package
from mlx_kvcache.commands import models as command
from mlx_kvcache.commands.console import INTERRUPTED, USER_ERROR
from mlx_kvcache.models import catalog, convert
from mlx_kvcache.models.store import (
    HOME_VARIABLE,
    SOURCE,
    Workspace,
    build_once,
    is_complete,
    lock_path,
)
from tests.support.gguf_files import Tiny, write


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


@pytest.fixture
def converted(home: Path, tmp_path: Path) -> Path:
    directory = package.resolve(write(tmp_path / "tiny.gguf", Tiny("llama")))
    assert directory.parent == home
    return directory


def fake(directory: Path, nbytes: int = 100) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(nbytes - 2))
    return directory


def left(home: Path, name: str = "") -> list[str]:
    """What is in the cache directory, of that name; locks stay."""
    return [p.name for p in home.iterdir() if name in p.name and p.suffix != ".lock"]


def listed(run) -> dict[str, Any]:
    result = run("models", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_an_empty_cache_directory(run, home) -> None:
    facts = listed(run)
    assert (facts["home"], facts["bytes"], facts["models"]) == (str(home), 0, [])
    assert [demo["name"] for demo in facts["demos"]] == ["smollm2", "gemma3-270m"]
    assert facts["demos"][0]["download_bytes"] == 92_871_040
    shown = run("models")
    assert shown.exit_code == 0
    assert "smollm2" in shown.stdout
    assert "93 MB" in shown.stdout
    assert f"0 models kept in {home}, 0 kB" in shown.stdout
    deleted = run("models", "--delete-all", "--yes")
    assert (deleted.exit_code, deleted.stderr) == (0, "no model is kept\n")
    assert not home.exists()


def test_what_is_kept_is_listed(run, home, converted, tmp_path) -> None:
    old = fake(home / "smollm2-v1")
    os.utime(old / "config.json", (1_000_000_000, 1_000_000_000))
    fake(home / ".gemma3-270m-v2.partial" / "model", 50)
    facts = listed(run)
    others = {each["name"]: each for each in facts["models"]}
    own = others.pop(converted.name)
    assert own["state"] == "ready"
    assert own["bytes"] == size_of(converted) > 100_000
    assert own["source"]["origin"] == str(tmp_path / "tiny.gguf")
    assert own["source"]["name"] == "tiny"
    assert own["directory"] == str(converted)
    assert others.keys() == {"smollm2-v1", "gemma3-270m-v2"}
    assert (others["smollm2-v1"]["state"], others["smollm2-v1"]["bytes"]) == (
        "earlier version",
        100,
    )
    assert datetime.fromisoformat(others["smollm2-v1"]["used"]).timestamp() == 1_000_000_000
    assert (others["gemma3-270m-v2"]["state"], others["gemma3-270m-v2"]["bytes"]) == (
        "unfinished",
        50,
    )
    assert facts["bytes"] == own["bytes"] + 150
    shown = run("models").stdout
    for word in (converted.name, "earlier version", "unfinished", "3 models kept", "tiny.gguf"):
        assert word in shown


def test_use_is_noted(run, converted, tmp_path) -> None:
    os.utime(converted / SOURCE, (5, 5))
    assert datetime.fromisoformat(listed(run)["models"][0]["used"]).timestamp() == 5
    package.resolve(tmp_path / "tiny.gguf")
    assert datetime.fromisoformat(listed(run)["models"][0]["used"]).timestamp() > 1e9


@pytest.mark.parametrize("name", ["own", "stem", "path"])
def test_one_is_deleted_by_any_of_its_names(name, run, home, converted, tmp_path) -> None:
    other = package.resolve(write(tmp_path / "other.gguf", Tiny("qwen3")))
    path = tmp_path / "tiny.gguf"
    given = {"own": converted.name, "stem": "tiny", "path": str(path)}[name]
    result = run("models", "--delete", given, "--yes")
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"deleted {converted.name}" in result.stderr
    assert [each["name"] for each in listed(run)["models"]] == [other.name]
    assert left(home, converted.name) == []
    # It is made again when it is asked for.
    assert package.resolve(path) == converted


def test_a_demo_is_deleted_in_all_its_versions(run, home) -> None:
    for name in ("smollm2-v1", "smollm2-v2", "smollm2-v2-packed", "gemma3-270m-v2"):
        fake(home / name)
    assert run("models", "--delete", "smollm2", "--yes").exit_code == 0
    assert left(home) == ["gemma3-270m-v2"]


def test_nothing_but_our_own_is_touched(run, home, converted) -> None:
    """The cache directory may be one in which other things are kept."""
    foreign = [fake(home / "my-model"), fake(home / ".git.partial"), home / "notes.txt"]
    foreign[-1].write_text("mine")
    for name in ("my-model", "..", "notes.txt", "."):
        result = run("models", "--delete", name, "--yes")
        assert result.exit_code == USER_ERROR
        assert f"no model {name!r} is kept; kept are: {converted.name}" in result.stderr
    result = run("models", "--delete-all", "--yes")
    assert result.exit_code == 0
    assert not converted.exists()
    assert all(path.exists() for path in foreign)


def test_deleting_is_confirmed(run, converted, monkeypatch) -> None:
    asked: list[str] = []

    def answer(value: bool | None):
        def confirm(question: str, err: bool) -> bool:
            assert err
            asked.append(question)
            if value is None:
                raise typer.Abort
            return value

        return confirm

    refused = run("models", "--delete-all", stdin="y\n")
    assert refused.exit_code == USER_ERROR
    assert "--yes" in refused.stderr
    assert asked == []
    monkeypatch.setattr(command, "on_terminal", lambda: True)
    for value, status in ((False, 0), (None, INTERRUPTED)):
        monkeypatch.setattr(typer, "confirm", answer(value))
        result = run("models", "--delete-all")
        assert result.exit_code == status
        assert converted.exists()
    monkeypatch.setattr(typer, "confirm", answer(True))
    assert run("models", "--delete-all").exit_code == 0
    assert not converted.exists()
    assert len(asked) == 3
    assert "Delete 1 model (" in asked[0]


def test_what_is_being_made_is_left_alone(run, home) -> None:
    """The lock is held by another; the model it makes, and its parts, stay."""
    name = f"smollm2-{convert.entry_suffix(packed=False)}"
    partial = fake(home / f".{name}.partial")
    with FileLock(lock_path(home / name)):
        result = run("models", "--delete-all", "--yes")
        assert result.exit_code == USER_ERROR
        assert "being made by another process" in result.stderr
        assert partial.exists()
    assert run("models", "--delete-all", "--yes").exit_code == 0
    assert not partial.exists()


def test_an_interrupted_deletion_is_finished_by_the_next(run, home, converted, monkeypatch) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    size = size_of(converted)
    with monkeypatch.context() as patch:
        patch.setattr(catalog.shutil, "rmtree", interrupted)
        assert run("models", "--delete-all", "--yes").exit_code == INTERRUPTED
    assert not converted.exists()
    facts = listed(run)["models"]
    assert [(each["state"], each["bytes"]) for each in facts] == [("unfinished", size)]
    assert run("models", "--delete-all", "--yes").exit_code == 0
    assert left(home, converted.name) == []


def test_a_build_that_waits_for_a_deletion_holds_the_same_lock(home) -> None:
    """Without its file, who waits and who comes later would each hold a lock of their own."""
    fake(home / "smollm2-v2")
    lock = lock_path(home / "smollm2-v2")
    lock.touch()
    inode = lock.stat().st_ino
    catalog.delete("smollm2-v2")
    assert list(home.iterdir()) == [lock]
    assert lock.stat().st_ino == inode
    assert catalog.entries() == ()

    def build(workspace: Workspace) -> None:
        workspace.model.rmdir()
        fake(workspace.model)

    assert is_complete(build_once("smollm2-v2", build))


def test_wrong_combinations(run, home) -> None:
    for arguments, word in (
        (("--delete", "x", "--delete-all"), "give one of them"),
        (("--json", "--delete-all"), "--json lists"),
        (("--json", "--delete", "x"), "--json lists"),
    ):
        result = run("models", *arguments)
        assert result.exit_code == USER_ERROR
        assert word in result.stderr
    assert not home.exists()


@pytest.mark.parametrize("columns", [40, 80])
def test_nothing_is_cut_in_a_narrow_terminal(
    columns: int, run, converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("models").stdout
    assert "…" not in shown
    for name in (
        (*(demo.name for demo in package.available()), converted.name)
        if columns == 80
        else ("smollm2",)
    ):
        assert name in shown
