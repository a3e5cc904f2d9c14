"""A converted model is there whole or not at all, whoever makes it and however that ends."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import mlx_kvcache.models as models
from mlx_kvcache.models.content import INDEX
from mlx_kvcache.models.progress import showing
from mlx_kvcache.models.store import HOME_VARIABLE, Workspace, build_once, is_complete
from tests.support.gguf_files import Tiny, write


def fill(workspace: Workspace) -> None:
    (workspace.model / "config.json").write_text("{}")
    (workspace.model / "model.safetensors").write_bytes(b"w")


def visible(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir() if p.suffix != ".lock" and p.name != INDEX)


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.home() == tmp_path / "own"
    monkeypatch.delenv(HOME_VARIABLE)
    assert models.home() == tmp_path / "xdg" / "mlx_kvcache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.home() == tmp_path / ".cache" / "mlx_kvcache"


def test_built_once(cache_home: Path) -> None:
    built: list[Workspace] = []

    def build(workspace: Workspace) -> None:
        (workspace.scratch / "download").write_bytes(b"d")
        fill(workspace)
        built.append(workspace)

    first = build_once("m", build)
    assert build_once("m", build) == first == cache_home / "m"
    assert len(built) == 1
    assert sorted(p.name for p in first.iterdir()) == ["config.json", "model.safetensors"]
    assert visible(cache_home) == ["m"]
    # A directory that lost a file is made anew.
    (first / "config.json").unlink()
    build_once("m", build)
    assert len(built) == 2
    assert is_complete(first)


@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_build_leaves_nothing(cache_home: Path, error: BaseException) -> None:
    def build(workspace: Workspace) -> None:
        fill(workspace)
        raise error

    with pytest.raises(type(error)):
        build_once("m", build)
    assert visible(cache_home) == []
    assert is_complete(build_once("m", fill))


def test_a_failed_rebuild_keeps_what_was_there(cache_home: Path) -> None:
    (cache_home / "m").mkdir(parents=True)
    (cache_home / "m" / "config.json").write_text("mine")

    def build(_: Workspace) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        build_once("m", build)
    assert (cache_home / "m" / "config.json").read_text() == "mine"


def test_a_killed_build_is_cleared(cache_home: Path) -> None:
    """Its lock goes with the process; what it had written does not get into the model."""
    script = textwrap.dedent(
        """
        import sys, time
        from mlx_kvcache.models.store import build_once
        def build(workspace):
            (workspace.model / "junk").write_bytes(b"j")
            print("half", flush=True)
            time.sleep(600)
        build_once("m", build)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        assert visible(cache_home) == [".m.partial"]
        process.send_signal(signal.SIGKILL)
    directory = build_once("m", fill)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert visible(cache_home) == ["m"]


@pytest.mark.usefixtures("cache_home")
def test_threads_build_one_model() -> None:
    inside, built = threading.Semaphore(1), []
    barrier = threading.Barrier(4)

    def build(workspace: Workspace) -> None:
        assert inside.acquire(blocking=False), "two builds at once"
        fill(workspace)
        built.append(workspace)
        inside.release()

    def call() -> None:
        barrier.wait()
        results.append(build_once("m", build))

    results: list[Path] = []
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(built) == 1


@pytest.mark.slow
def test_processes_convert_one_file_once(cache_home: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", Tiny("qwen3"))
    script = "import sys; from mlx_kvcache.models import load; load(sys.argv[1])"
    command = [sys.executable, "-c", script, str(path)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    output = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], output
    assert sum(text.count("Converting") for text in output) == 1
    assert len(visible(cache_home)) == 1


@pytest.mark.usefixtures("cache_home")
def test_an_exception_in_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights cannot be written: no model appears, and the next call makes it."""
    import mlx.core as mx

    path = write(tmp_path / "t.gguf", Tiny("llama"))

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", full)
        with pytest.raises(OSError, match="no space left"):
            models.resolve(path)
    assert visible(models.home()) == []
    assert is_complete(models.resolve(path))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_is_a_bar_on_a_terminal_only(
    keep: bool,
    stream: type[io.StringIO],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    with showing("Working: 2 MB to /there", total=2, keep=keep) as advance:
        advance()
        advance()
    text = stderr.getvalue()
    if stream is Terminal:
        assert "Working" in text
        assert "\x1b[" in text
        # A line that stays, above the bar that vanishes.
        assert text.startswith("Working: 2 MB to /there\n") is keep
    else:
        assert text == "Working: 2 MB to /there ...\n"
    assert capsys.readouterr().out == ""
