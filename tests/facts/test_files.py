"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mlx_kvcache.facts.files import replacing


def test_the_new_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_whatever_is_raised_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    replacement = replacing(path)
    replacement.__enter__().write_text("half")
    assert not replacement.__exit__(error, error(), None), "the error goes on its way"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "file"):
        pytest.fail("there is nowhere to write to")


@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_the_permissions_are_those_of_a_plain_file_or_less(tmp_path: Path, mode: int) -> None:
    plain, path = tmp_path / "plain", tmp_path / "file"
    os.close(os.open(plain, os.O_CREAT | os.O_WRONLY, mode))
    with replacing(path, mode) as partial:
        assert stat.S_IMODE(partial.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_an_old_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    with replacing(path, 0o666) as partial:
        partial.write_text("new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as partial:
        partial.write_text("new")
    assert not link.is_symlink()
    assert (link.read_text(), target.read_text()) == ("new", "old")


def test_what_is_no_plain_file_is_left_alone(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(FileExistsError), replacing(path):
            pytest.fail("it would be gone")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [folder, pipe]
