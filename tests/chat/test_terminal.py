"""`mlx-kvcache chat` on a terminal: prompt, editing, history, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import pty
import re
import select
import stat
import subprocess
import sys
import time

import pytest

from mlx_kvcache.commands import chat_input
from tests.support.processes import COMMAND, hear_ctrl_c
from tests.support.tiny_models_on_disk import words

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, directory, state, *arguments, code=None, **streams):
        self.leader, follower = pty.openpty()
        command = COMMAND if code is None else [sys.executable, "-c", code]
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(
            [*command, "chat", "--model", str(directory), "--max-tokens", "6", *arguments],
            **{"stdin": follower, "stdout": follower, "stderr": follower, **streams},
            env=environment,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(follower)
        self.shown = ""

    def type(self, text):
        os.write(self.leader, text.encode())

    def wait_for(self, text, seconds=60):
        """What was shown up to `text`, which must come."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.leader], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} did not come; shown: {self.shown!r}"
            try:
                part = os.read(self.leader, 65536)
            except OSError:
                part = b""
            assert part, f"the terminal closed before {text!r}; shown: {self.shown!r}"
            self.shown = ESCAPES.sub("", self.shown + part.decode(errors="replace"))
        before, _, self.shown = self.shown.partition(text)
        return before

    def press_ctrl_c_at_the_prompt(self):
        # One that comes between the prompt and Python's wait for a key waits for the next key.
        time.sleep(0.3)
        self.type("\x03")

    def end(self):
        status = self.process.wait(timeout=60)
        os.close(self.leader)
        return status


def own_terminal():
    """Make the pseudo-terminal the one from which Ctrl-C comes."""
    hear_ctrl_c()
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(directories, tmp_path):
    started = []

    def start(*arguments, **choices):
        started.append(Terminal(directories(), tmp_path / "state", *arguments, **choices))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def test_a_chat_on_a_terminal(terminal, tmp_path):
    chat = terminal()
    greeting = chat.wait_for("main> ")
    assert "/help lists the commands" in greeting
    assert "2 flat + 2 ring(8) layers, 0/512 positions" in greeting
    chat.type(words(5) + "\n")
    answer = chat.wait_for("the answer was cut at 6 tokens")
    # The line as it was typed, and the answer.
    assert len(re.findall(r"w\d+", answer)) == 1 + 6
    chat.wait_for("main> ")
    chat.type("/fork side\n")
    chat.wait_for("side is a copy of main")
    chat.wait_for("main> ")
    chat.type("/switch side\n")
    chat.wait_for("this is side")
    chat.wait_for("side> ")
    chat.type("/undo\n")
    chat.wait_for("back to 0 turns, 0 tokens")
    chat.wait_for("side> ")
    # The arrow recalls /undo, and an x is put before its second letter.
    chat.type("\x1b[A\x01\x06x\n")
    chat.wait_for("error: there is no command /xundo;")
    chat.wait_for("side> ")
    chat.type("/nope\n")
    chat.wait_for("error: there is no command /nope;")
    chat.wait_for("side> ")
    chat.type("\x04")
    assert chat.end() == 0
    history = tmp_path / "state" / "mlx_kvcache" / "chat_history"
    assert "/fork side" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert [history] == list(history.parent.iterdir())

    again = terminal()
    again.wait_for("main> ")
    again.type("\x1b[A")
    again.wait_for("/nope")
    again.type("\x15/quit\n")
    assert again.end() == 0


def test_ctrl_c_on_a_terminal(terminal):
    chat = terminal("--max-tokens", "1000000", "--capacity", "1100000")
    chat.wait_for("main> ")
    chat.type(words(5) + "\n")
    for _ in range(5):
        chat.wait_for(" w")
    chat.type("\x03")
    chat.wait_for("interrupted; the answer stays as it is")
    chat.wait_for("main> ")
    chat.type("half a line")
    chat.wait_for("half a line")
    chat.press_ctrl_c_at_the_prompt()
    chat.wait_for("Ctrl-C again leaves")
    chat.wait_for("main> ")
    chat.type("/stats\n")
    chat.wait_for("main: 1 turn")
    chat.wait_for("main> ")
    chat.press_ctrl_c_at_the_prompt()
    chat.wait_for("Ctrl-C again leaves")
    chat.wait_for("main> ")
    chat.press_ctrl_c_at_the_prompt()
    chat.wait_for("interrupted")
    assert chat.end() == 130


def test_without_readline_it_works_too(terminal, tmp_path):
    code = (
        "import sys\nsys.modules['readline'] = None\n"
        "from mlx_kvcache.commands.app import main\nmain()\n"
    )
    chat = terminal(code=code)
    chat.wait_for("main> ")
    chat.type(words(5) + "\n")
    chat.wait_for("cut at 6 tokens")
    chat.wait_for("main> ")
    chat.type("/quit\n")
    assert chat.end() == 0
    assert not (tmp_path / "state").exists()


def test_an_output_that_goes_elsewhere_gets_no_prompt(terminal):
    chat = terminal(stdout=subprocess.PIPE)
    chat.wait_for("main> ")
    chat.type(words(5) + "\n")
    chat.wait_for("cut at 6 tokens")
    chat.wait_for("main> ")
    chat.type("/quit\n")
    output = chat.process.stdout.read().decode()
    assert chat.end() == 0
    assert re.fullmatch(r"(w\d+ ){5}w\d+\n", output)


def test_a_long_turn_shows_a_bar(terminal):
    chat = terminal("--prefill-step", "50")
    chat.wait_for("main> ")
    chat.type(words(*(3 + number % 90 for number in range(300))) + "\n")
    shown = chat.wait_for("cut at 6 tokens")
    assert "reading the prompt" in shown
    assert "306/306" in shown
    chat.wait_for("main> ")
    chat.type(words(5) + "\n")
    assert "reading the prompt" not in chat.wait_for("cut at 6 tokens")
    chat.wait_for("main> ")
    chat.type("/quit\n")
    assert chat.end() == 0


def test_a_history_that_cannot_be_kept_is_no_reason_to_stop(monkeypatch, tmp_path):
    class Readline:
        @staticmethod
        def refuse(*_):
            raise OSError

        read_history_file = write_history_file = refuse

        @staticmethod
        def set_history_length(_):
            pass

    monkeypatch.setattr(chat_input, "on_terminal", lambda: True)
    monkeypatch.setattr(chat_input, "_readline", lambda: Readline)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with chat_input.line_history():
        pass
    assert list((tmp_path / "mlx_kvcache").iterdir()) == []
    assert chat_input.history_path() == tmp_path / "mlx_kvcache" / "chat_history"
