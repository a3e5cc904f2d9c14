"""The results file of `batch`: whole lines, one writer, and what a disk or Ctrl-C may do to it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

import pytest

from mlx_kvcache.commands import batch_file
from mlx_kvcache.commands.batch_file import ResultsFile, hold
from mlx_kvcache.errors import ConfigError
from tests.support.interrupts import Interrupter

LINES = {number: f'{{"line": {number}, "text": "{"x" * 7 * number}"}}\n' for number in range(1, 6)}
OLD = '{"line": 9}\n'


def write_all(results, numbers=LINES):
    for number in numbers:
        results.write(number, lambda number=number: LINES[number])


def text_of(*numbers):
    return "".join(LINES[number] for number in numbers)


@pytest.fixture
def old(tmp_path):
    """A file of earlier results, and a lock on it."""
    path = tmp_path / "results"
    path.write_text(OLD)
    path.chmod(0o640)
    held = hold(path)
    yield path, held
    os.close(held)


def opened(path, held, how):
    if how == "new":
        return ResultsFile.new(path.with_name("new"))
    if how == "extended":
        return ResultsFile.extended(path, held, len(OLD))
    return ResultsFile.replacement(path, held, OLD.encode())


def test_a_new_file_gets_each_line_once(tmp_path):
    path = tmp_path / "results"
    with ResultsFile.new(path) as results:
        write_all(results)
        assert path.read_text() == text_of(*LINES)
        results.write(2, lambda: pytest.fail("a line that is there was asked for"))
        results.finish()
    assert path.read_text() == text_of(*LINES)
    with pytest.raises(ConfigError, match="another run"):
        ResultsFile.new(path)
    assert path.read_text() == text_of(*LINES)


def test_the_torn_rest_of_a_line_is_overwritten(tmp_path):
    path = tmp_path / "results"
    path.write_text(OLD + '{"line": 1, "text": "' + "y" * 100)
    held = hold(path)
    with ResultsFile.extended(path, held, len(OLD)) as results:
        write_all(results, [1])
        assert path.read_text() == OLD + text_of(1)
        write_all(results, [3])
    os.close(held)
    assert path.read_text() == OLD + text_of(1, 3)


def test_a_replacement_stands_from_its_first_result_on(old):
    path, held = old
    with ResultsFile.replacement(path, held, b"") as results:
        assert path.read_text() == OLD
        write_all(results, [1])
        assert path.read_text() == text_of(1)
        write_all(results, [2])
    assert path.read_text() == text_of(1, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in path.parent.iterdir()] == ["results"]


@pytest.mark.parametrize("how", ["new", "extended", "replacement"])
def test_without_a_result_all_is_as_before(old, how):
    path, held = old
    with opened(path, held, how):
        pass
    assert path.read_text() == OLD
    assert [each.name for each in path.parent.iterdir()] == ["results"]


@pytest.mark.parametrize("how", ["new", "extended", "replacement"])
def test_one_run_holds_it(old, how):
    path, held = old
    target = path.with_name("new") if how == "new" else path
    with opened(path, held, how) as results:
        write_all(results, [1])
        with pytest.raises(ConfigError, match="another run is writing"):
            hold(target)
        write_all(results, [2])
    if how != "extended":
        os.close(hold(target))


def test_only_a_regular_file_can_be_held(tmp_path):
    assert hold(tmp_path / "nothing") is None
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", type(tmp_path)(os.devnull)):
        with pytest.raises(ConfigError, match="not a regular file"):
            hold(path)


@pytest.mark.parametrize("how", ["extended", "replacement"])
def test_a_file_that_was_taken_away_is_noticed(old, how):
    path, held = old
    with opened(path, held, how) as results:
        write_all(results, [1])
        path.unlink()
        path.write_text("of somebody else\n")
        with pytest.raises(FileNotFoundError, match="moved or deleted"):
            write_all(results, [2])
    assert path.read_text() == "of somebody else\n"


def test_a_new_file_that_was_taken_away_before_its_first_result(tmp_path):
    path = tmp_path / "results"
    with ResultsFile.new(path) as results:
        path.unlink()
        path.write_text("of somebody else\n")
        with pytest.raises(FileNotFoundError, match="moved or deleted"):
            write_all(results)
    assert path.read_text() == "of somebody else\n"


@pytest.mark.parametrize("how", ["new", "extended", "replacement"])
@pytest.mark.parametrize("fitting", [0, 1, 3])
def test_a_full_disk_leaves_whole_lines(old, monkeypatch, how, fitting):
    path, held = old
    target = path.with_name("new") if how == "new" else path
    before = "" if how == "new" else OLD
    room = len(before + text_of(*range(1, fitting + 1))) + 5
    pwrite = os.pwrite

    def limited(descriptor, data, offset):
        if offset >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[: room - offset], offset)

    with opened(path, held, how) as results:
        monkeypatch.setattr(batch_file.os, "pwrite", limited)
        with pytest.raises(OSError, match="No space left on device; --resume") as caught:
            write_all(results)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(target)
        monkeypatch.undo()
    written = before + text_of(*range(1, fitting + 1))
    assert (target.read_text() if target.exists() else "") == written
    assert path.read_text() == (OLD if how == "new" else written)
    names = {"results", "new"} if how == "new" and fitting else {"results"}
    assert {each.name for each in path.parent.iterdir()} == names


@pytest.mark.parametrize("how", ["new", "extended", "replacement"])
def test_an_interrupt_at_any_line_neither_loses_nor_repeats(tmp_path, how):
    """After it, every line is written once more: as the command does with what was finished."""

    def trial(number, at):
        path = tmp_path / f"{how}-{number}" / "results"
        path.parent.mkdir()
        path.write_text(OLD)
        held = hold(path)
        interrupter = Interrupter([batch_file.__file__], at)
        with opened(path, held, how) as results:
            with suppress(KeyboardInterrupt):
                interrupter.call(lambda: write_all(results))
            write_all(results)
        os.close(held)
        target = path.with_name("new") if how == "new" else path
        assert target.read_text() == ("" if how == "new" else OLD) + text_of(*LINES)
        assert len(list(path.parent.iterdir())) == (2 if how == "new" else 1)
        return len(interrupter.lines)

    count = trial("whole", None)
    assert count > 50
    for at in range(count):
        assert trial(at, at) == at + 1


@pytest.mark.parametrize("how", ["new", "extended", "replacement"])
def test_an_interrupt_at_any_line_that_ends_it_keeps_whole_lines(tmp_path, how):
    def trial(number, at):
        path = tmp_path / f"{how}-{number}" / "results"
        path.parent.mkdir()
        path.write_text(OLD)
        held = hold(path)
        noted = []

        def run():
            with opened(path, held, how) as results:
                for number in LINES:
                    results.write(number, lambda number=number: LINES[number])
                    noted.append(number)

        interrupter = Interrupter([batch_file.__file__], at)
        with suppress(KeyboardInterrupt):
            interrupter.call(run)
        os.close(held)
        target = path.with_name("new") if how == "new" else path
        text = target.read_text() if target.exists() else ""
        before = "" if how == "new" else OLD
        possible = [before + text_of(*LINES)[: len(text_of(*range(1, n + 1)))] for n in range(6)]
        assert text in possible[len(noted) : len(noted) + 2]
        return len(interrupter.lines)

    count = trial("whole", None)
    for at in range(count):
        trial(at, at)
