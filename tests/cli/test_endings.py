"""However a process ends: one line on stderr at most, the right exit status, and no traceback."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import COMMAND, ROOT, hear_ctrl_c
from tests.support.tiny_models_on_disk import words, write_model

pytestmark = pytest.mark.slow

#: Stands for the directory of a tiny model.
MODEL = "MODEL"
GENERATE = ("generate", words(5, 17), "--model", MODEL, "--max-tokens", "4")
ENDLESS = (*GENERATE[:-1], "1000000", "--capacity", "1100000", "--quiet")
INSPECT = ("inspect", f"{MODEL}/config.json")
WRONG = ("inspect", MODEL, "--context", "0")
OP = ("op", "--kv-cache", "64,1,1,8")
FULL = r"error: \[Errno 28\] No space left on device\n"
CLOSED = r"error: \[Errno 9\] Bad file descriptor\n"
FIGURES = r"cache .*\nmemory .*\nspeed .*\n"
REPORT = r"(.*\n){5,}"
ANSWER = r"(w\d+ ?)+\n"
#: What the process does when a module is looked for: a signal, where it can be caught or not.
SIGNAL_AT_IMPORT = """
import signal, sys
name, target, lost = sys.argv[1], sys.argv[2], sys.argv[3] == "lost"
number = getattr(signal, name)

class Dropped:
    def __del__(self):
        signal.raise_signal(number)

class Finder:
    def find_spec(self, fullname, path=None, module=None):
        if fullname == target:
            sys.meta_path.remove(self)
            if lost:
                Dropped()
            else:
                signal.raise_signal(number)

sys.meta_path.insert(0, Finder())
sys.argv = ["mlx-kvcache", *sys.argv[4:]]
from mlx_kvcache.__main__ import main
main()
"""


@dataclass(frozen=True)
class Case:
    """A process and how it must end.

    stdin, stdout, stderr: "pipe", "closed", "gone" (a pipe whose reader is), "terminal", or a
    path. out, err: what all of a stream must match, where it is a pipe or a terminal. send: signals
    once it has begun to answer.
    """

    name: str
    arguments: Sequence[str | bytes]
    status: int | tuple[int, ...] = 0
    out: str = ""
    err: str = ""
    stdin: str = "/dev/null"
    stdout: str = "pipe"
    stderr: str = "pipe"
    given: bytes = b""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    directory: str = str(ROOT)
    send: Sequence[signal.Signals] = ()
    ignored: signal.Signals | None = None
    at_import: tuple[str, ...] = ()


OUTPUTS = [
    Case("help, full disk", ["--help"], 1, err=FULL, stdout="/dev/full"),
    Case("version, full disk", ["--version"], 1, err=FULL, stdout="/dev/full"),
    Case("inspect, full disk", INSPECT, 1, err=FULL, stdout="/dev/full"),
    Case("op, full disk", OP, 1, err=FULL, stdout="/dev/full"),
    Case("generate, full disk", GENERATE, 1, err=FULL, stdout="/dev/full"),
    Case("help, closed output", ["--help"], 1, err=CLOSED, stdout="closed"),
    Case("inspect, closed output", INSPECT, 1, err=CLOSED, stdout="closed"),
    Case("op, closed output", OP, 1, err=CLOSED, stdout="closed"),
    Case("everything closed", INSPECT, 1, stdin="closed", stdout="closed", stderr="closed"),
    Case("help, reader gone", ["--help"], 141, stdout="gone"),
    Case("inspect, reader gone", INSPECT, 141, stdout="gone"),
    Case("op, reader gone", OP, 141, stdout="gone"),
    Case("generate, reader gone", GENERATE, 141, stdout="gone"),
    Case("errors, full disk", WRONG, 2, stderr="/dev/full"),
    Case("errors, closed", WRONG, 2, stderr="closed"),
    Case("errors, reader gone", WRONG, 2, stderr="gone"),
    Case("figures, full disk", GENERATE, out=ANSWER, stderr="/dev/full"),
]
INPUTS = [
    Case("no input", ["generate"], 2, err="error: the prompt is empty; .*\n"),
    Case("closed input", ["generate"], 2, err="error: the prompt is empty; .*\n", stdin="closed"),
    Case("a terminal", ["generate"], 2, err="error: there is no prompt; .*\n", stdin="terminal"),
    Case("a prompt and closed input", GENERATE, 0, ANSWER, FIGURES, stdin="closed"),
    Case("a directory as file", ["generate", "-f", "/"], 2, err="error: / is a dir.*\n"),
    Case("no such user", ["generate", "-f", "~nobody-of-this-name/x"], 2, err="error: '~.*\n"),
    Case("no such file", ["generate", "-f", "/nix/x"], 2, err="error: there is no file .*\n"),
    Case(
        "a file that cannot be read", ["generate", "-f", "/proc/self/mem"], 1, err="error: .*\n"
    ),
    Case("bytes as prompt", ["generate", b"w5 \xff"], 2, err="error: the prompt is not valid.*\n"),
    Case("bytes as model", ["inspect", b"./\xff"], 2, err="error: .*\n"),
    Case("bytes as option", ["generate", b"--\xff"], 2, err="error: .*--help lists.*\n"),
    Case("bytes as command", [b"\xff"], 2, err="error: No such command .*\n"),
    Case(
        "bytes as input", ["generate"], 2, err="error: standard input is not valid UTF-8.*\n",
        stdin="pipe", given=b"w5 \xff",
    ),
    Case("an empty option", ["generate", "w5", "--model="], 2, err="error: --model is empty.*\n"),
]  # fmt: skip
SURROUNDINGS = [
    Case("no HOME", GENERATE, 0, ANSWER, FIGURES, environment={"HOME": None}),
    Case("a HOME that is not there", INSPECT, 0, REPORT, environment={"HOME": "/nix"}),
    Case("a HOME for reading only", INSPECT, 0, REPORT, environment={"HOME": "/proc"}),
    Case("a folder for reading only", INSPECT, 0, REPORT, directory="/proc"),
    Case("a folder that is gone", INSPECT, 0, REPORT, directory="gone"),
    Case(
        "completion for a HOME for reading only", ["--install-completion", "bash"], (1, 2),
        err="error: .*\n",
        # Else the shell is that of whoever runs the tests, of which typer knows some.
        environment={"HOME": "/proc", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    ),
    Case("40 columns", ["--help"], 0, r"([^\n]{,40}\n)+", environment={"COLUMNS": "40"}),
    Case("inspect in 40 columns", INSPECT, 0, r"[^…]+", environment={"COLUMNS": "40"}),
    Case(
        "an error in 40 columns", ["inspect", "./" + "nix/" * 30], 2, err="error: .*\n",
        environment={"COLUMNS": "40"},
    ),
    Case("columns that are none", INSPECT, 0, REPORT, environment={"COLUMNS": "many"}),
    Case(
        "a dumb terminal", WRONG, 2, err=r"error: [^\x1b]*\n", stderr="terminal",
        environment={"TERM": "dumb"},
    ),
    Case(
        "a terminal without color", WRONG, 2,
        err=r"(\x1b\[[01]m)?error: [^\x1b]*(\x1b\[0m)?\n", stderr="terminal",
        environment={"TERM": "xterm", "NO_COLOR": "1"},
    ),
]  # fmt: skip
SIGNALS = [
    Case("Ctrl-C", ENDLESS, 130, ANSWER, "interrupted\n", send=[signal.SIGINT]),
    Case("SIGTERM", ENDLESS, 143, r"(w\d+ ?)+", "terminated\n", send=[signal.SIGTERM]),
    Case(
        "Ctrl-C twice", ENDLESS, 130, r"(w\d+ ?)+\n?", "(interrupted\n)?",
        send=[signal.SIGINT, signal.SIGINT],
    ),
    Case(
        "SIGHUP that is ignored, then SIGTERM", ENDLESS, 143, r"(w\d+ ?)+", "terminated\n",
        send=[signal.SIGHUP, signal.SIGTERM], ignored=signal.SIGHUP,
    ),
    *(
        Case(
            f"{name} at the import of {target}, {how}", [*arguments, "--json"],
            128 + getattr(signal, name),
            err="interrupted\n" if name == "SIGINT" else "terminated\n",
            at_import=(name, target, how),
        )
        for name, target, how, arguments in (
            ("SIGINT", "mlx_kvcache.commands.process", "caught", OP),
            ("SIGINT", "mlx_kvcache.commands.app", "caught", OP),
            ("SIGINT", "typer", "lost", OP),
            ("SIGINT", "mlx.core", "caught", OP),
            ("SIGINT", "mlx_lm.generate", "lost", GENERATE),
            ("SIGTERM", "mlx_kvcache.commands.app", "caught", OP),
            ("SIGTERM", "mlx.core", "lost", OP),
            ("SIGTERM", "transformers", "caught", GENERATE),
            ("SIGHUP", "numpy", "caught", OP),
        )
    ),
]  # fmt: skip
CASES = {case.name: case for case in (*OUTPUTS, *INPUTS, *SURROUNDINGS, *SIGNALS)}


@dataclass
class Ended:
    """How a process ended, and what it wrote."""

    status: int
    out: str
    err: str


class Streams:
    """The descriptors of a process: those it is given, and what is read from it."""

    def __init__(self, case: Case) -> None:
        self.kinds = (case.stdin, case.stdout, case.stderr)
        self.given: list[int] = []
        self.leaders: dict[int, int] = {}
        for number, kind in enumerate(self.kinds):
            self.given.append(self._open(number, kind))

    def _open(self, number: int, kind: str) -> int:
        if kind == "pipe":
            return subprocess.PIPE
        if kind == "closed":
            return subprocess.DEVNULL
        if kind == "terminal":
            leader, follower = pty.openpty()
            self.leaders[number] = leader
            return follower
        if kind == "gone":
            read, write = os.pipe()
            os.close(read)
            return write
        return os.open(kind, os.O_RDONLY if number == 0 else os.O_WRONLY)

    def begun(self) -> None:
        """The process has its own copies."""
        for descriptor in self.given:
            if descriptor >= 0:
                os.close(descriptor)

    def shown(self, number: int) -> str:
        """What was written to a terminal."""
        leader = self.leaders.pop(number)
        found = bytearray()
        try:
            while part := os.read(leader, 65536):
                found += part
        except OSError:
            pass
        os.close(leader)
        return found.decode().replace("\r\n", "\n")


def run_case(case: Case, model: Path, gone: Path) -> Ended:
    arguments = [
        each.replace(MODEL, str(model)) if isinstance(each, str) else each
        for each in case.arguments
    ]
    command = COMMAND
    if case.at_import:
        command = [sys.executable, "-c", SIGNAL_AT_IMPORT, *case.at_import]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name, value in case.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value

    def prepare() -> None:
        hear_ctrl_c()
        if case.ignored is not None:
            signal.signal(case.ignored, signal.SIG_IGN)
        if case.directory == "gone":
            os.mkdir(gone)
            os.chdir(gone)
            os.rmdir(gone)
        for number, kind in enumerate(streams.kinds):
            if kind == "closed":
                os.close(number)

    streams = Streams(case)
    process = subprocess.Popen(
        [*command, *arguments],
        bufsize=0,
        stdin=streams.given[0],
        stdout=streams.given[1],
        stderr=streams.given[2],
        env=environment,
        cwd=None if case.directory == "gone" else case.directory,
        preexec_fn=prepare,
    )
    streams.begun()
    begun = b""
    if case.send:
        assert process.stdout is not None
        begun = process.stdout.read(1)
    for number in case.send:
        process.send_signal(number)
        time.sleep(0.05)
    try:
        out, err = process.communicate(case.given or None, timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    written = {1: begun + (out or b""), 2: err or b""}
    texts = {
        number: streams.shown(number) if number in streams.leaders else data.decode()
        for number, data in written.items()
    }
    # A shell tells of a process that a signal ended as of one with this status.
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Ended(status, texts[1], texts[2])


@pytest.fixture(scope="module")
def ended(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Ended]]]:
    """The processes of all cases that were asked for, some at a time."""
    model = write_model(tmp_path_factory.mktemp("endings"))
    gone = tmp_path_factory.mktemp("gone")
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
        yield {
            name: pool.submit(run_case, CASES[name], model, gone / str(number))
            for number, name in enumerate(asked)
        }


def cases() -> Iterator[Any]:
    """The names, those marked that need what only Linux has."""
    for name, case in CASES.items():
        values = (case.stdin, case.stdout, case.stderr, case.directory, *case.arguments)
        paths = [*values, *case.environment.values()]
        lacking = [
            path
            for path in ("/dev/full", "/proc")
            if not Path(path).exists() and any(path in str(each) for each in paths)
        ]
        reason = f"there is no {', '.join(lacking)} here"
        yield pytest.param(name, marks=pytest.mark.skipif(bool(lacking), reason=reason))


@pytest.mark.parametrize("name", list(cases()))
def test_it_ends_in_one_line(ended, name):
    case, found = CASES[name], ended[name].result()
    assert "Traceback" not in found.err + found.out
    assert "Exception ignored" not in found.err
    if case.stderr in ("pipe", "terminal"):
        assert re.fullmatch(case.err, found.err), found.err
    if case.stdout in ("pipe", "terminal"):
        assert re.fullmatch(case.out, found.out), found.out[:500]
    statuses = case.status if isinstance(case.status, tuple) else (case.status,)
    assert found.status in statuses, found


def test_every_name_is_one_case():
    assert len(CASES) == len(OUTPUTS) + len(INPUTS) + len(SURROUNDINGS) + len(SIGNALS) >= 50


def test_a_reader_that_takes_one_line():
    script = f"{sys.executable} -m mlx_kvcache --help | head -1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode in (0, 141)
    assert (result.stderr, len(result.stdout.splitlines())) == ("", 1)
