"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.files import expanded, replacing


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
    with replacing(path) as partial:
        partial.write_text("new")
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)
    with replacing(path, 0o600):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o444, 0o400, 0o000])
def test_a_file_that_may_not_be_written_is_replaced(tmp_path: Path, mode: int) -> None:
    """By whoever may write the folder, root or not: the new one has its mode at the end."""
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    with replacing(path) as partial:
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        partial.write_text("new")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o600)
    assert path.read_text() == "new"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another group")
def test_the_group_is_kept_or_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for allowed, group, mode in ((True, 4711, 0o664), (False, os.getegid(), 0o604)):
        path.write_text("old")
        os.chown(path, -1, 4711)
        path.chmod(0o664)
        if not allowed:
            monkeypatch.setattr(os, "chown", refused)
        with replacing(path) as partial:
            partial.write_text("new")
        assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (group, mode)


def refused(*_: object) -> None:
    raise PermissionError


def test_a_name_as_long_as_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    with replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"


def test_what_a_chain_of_links_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, first, second = tmp_path / "folder" / "target", tmp_path / "a", tmp_path / "b"
    first.symlink_to(second)
    second.symlink_to("folder/../folder/target")
    for content in ("new", "newer"):
        with replacing(first, follow=True) as partial:
            assert partial.parent == target.parent
            partial.write_text(content)
        assert target.read_text() == content
    assert first.is_symlink()
    assert second.is_symlink()


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, loop / "x"):
        with pytest.raises(OSError, match="Too many levels"), replacing(path, follow=True):
            pytest.fail("there is nowhere to write to")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at open files of Linux")
def test_what_is_open_is_not_replaced_by_its_number(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        file.write("old")
        file.flush()
        for folder in ("/dev/fd", "/proc/self/fd"):
            path = Path(folder, str(file.fileno()))
            with pytest.raises(FileExistsError, match="another name"), replacing(path, follow=True):
                pytest.fail("it would be gone")
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "\ud800"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a file"):
        expanded(name)


def test_the_home_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/x") == tmp_path / "x"
    assert expanded(Path("y")) == Path("y")


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
