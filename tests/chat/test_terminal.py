"""`mlx-kvcache chat` on a terminal: messages, editing, history, and the keys that interrupt."""

from __future__ import annotations

import json
import re
import shlex
import stat
import subprocess
import sys

import pytest
from prompt_toolkit.document import Document

from mlx_kvcache.commands.chat_commands import COMMANDS
from mlx_kvcache.commands.chat_terminal import CommandCompleter, MessageHistory
from tests.support.processes import COMMAND, ROOT
from tests.support.terminals import Terminal
from tests.support.tiny_models_on_disk import words

ENDLESS = ("--max-tokens", "1000000", "--capacity", "1100000")
CUT = "the answer was cut at 6 tokens"


@pytest.fixture
def terminal(directories, tmp_path):
    """`terminal(*arguments, shell=...)`: a chat; shell: a line for bash with its command as %s."""
    started = []

    def start(*arguments, shell=""):
        command = [*COMMAND, "chat", "--model", str(directories()), "--max-tokens", "6", *arguments]
        if shell:
            command = ["bash", "--norc", "-c", shell.replace("%s", shlex.join(command))]
        started.append(Terminal(command, {"XDG_STATE_HOME": str(tmp_path / "state")}))
        return started[-1]

    yield start
    for each in started:
        each.close()


def say(chat, text, prompt="main>"):
    """Say something whose answer is cut, and wait for the next prompt; what was shown."""
    chat.type(text + "\r")
    shown = chat.wait_for(CUT)
    chat.wait_for(prompt)
    return shown


@pytest.mark.slow
def test_a_chat_on_a_terminal(terminal, tmp_path):
    chat = terminal()
    greeting = chat.wait_for("main>")
    assert "/help lists the commands" in greeting
    assert "2 flat + 2 ring(8) layers, 0/512 positions" in greeting
    answer = say(chat, words(5)).strip().splitlines()[-1]
    assert len(re.findall(r"w\d+", answer)) == 6
    chat.type("/fork side\r")
    chat.wait_for("side is a copy of main")
    chat.wait_for("main>")
    chat.type("/switch side\r")
    chat.wait_for("this is side")
    chat.wait_for("side>")
    chat.type("/undo\r")
    chat.wait_for("back to 0 turns, 0 tokens")
    chat.wait_for("side>")
    chat.type("/undo\r")
    chat.wait_for("error: there is no turn to undo; the conversation is empty")
    chat.wait_for("side>")
    # The arrow recalls /undo, and an x is put before its second letter.
    chat.type("\x1b[A\x01\x06x\r")
    chat.wait_for("error: there is no command /xundo;")
    chat.wait_for("side>")
    # The end of what the tabulator completes is a command of its own.
    chat.type("/for\t")
    chat.wait_for("/forks")
    chat.type("s\r")
    chat.wait_for("* side: 0 turns")
    chat.wait_for("side>")
    chat.type("\x04")
    assert chat.end() == 0
    history = tmp_path / "state" / "mlx_kvcache" / "chat_history"
    entries = ["w5", "/fork side", "/switch side", "/undo", "/xundo", "/forks"]
    assert history.read_text().splitlines() == entries
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert [history] == list(history.parent.iterdir())

    again = terminal()
    again.wait_for("main>")
    again.type("\x1b[A\x1b[A")
    again.wait_for("/xundo")
    again.type("\x15/exit\r")
    assert again.end() == 0


@pytest.mark.slow
def test_a_message_of_several_lines_is_one_turn(terminal, tmp_path):
    chat = terminal()
    chat.wait_for("main>")
    pasted = f"{words(5, 17)}\n{words(6)}\r\n{words(7)}"
    chat.paste(pasted)
    say(chat, "")
    say(chat, f"{words(8)}\x1b\r{words(10)}")
    say(chat, f"{words(11)}\\\r{words(12)}")
    # From the history, whole.
    chat.type("\x1b[A\x1b[A\x1b[A")
    say(chat, "")
    saved = tmp_path / "chat.jsonl"
    chat.type(f"/save {saved}\r")
    chat.wait_for("8 messages written")
    chat.wait_for("main>")
    chat.resize(12, 50)
    chat.type("/undo\r")
    chat.wait_for("back to 3 turns")
    chat.wait_for("main>")
    chat.type("/quit\r")
    assert chat.end() == 0
    messages = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [each["content"] for each in messages[::2]] == [
        "w5 w17\nw6\nw7", "w8\nw10", "w11\nw12", "w8\nw10",
    ]  # fmt: skip
    again = terminal()
    again.wait_for("main>")
    again.type("\x1b[A" * 10)
    again.wait_for("w5 w17")
    again.wait_for("w7")
    say(again, "")
    again.type(f"/save --force {saved}\r")
    again.wait_for("2 messages written")
    again.wait_for("main>")
    again.type("\x04")
    assert again.end() == 0
    assert json.loads(saved.read_text().splitlines()[0])["content"] == "w5 w17\nw6\nw7"


@pytest.mark.slow
def test_ctrl_c_and_another_size_while_it_answers(terminal):
    chat = terminal(*ENDLESS)
    chat.wait_for("main>")
    chat.type(words(5))
    chat.resize(10, 40)
    chat.type("\r")
    for _ in range(5):
        chat.wait_for(" w")
    chat.resize(30, 120)
    for _ in range(5):
        chat.wait_for(" w")
    chat.type("\x03")
    chat.wait_for("interrupted; the answer stays as it is")
    chat.wait_for("main>")
    chat.type("half a line")
    chat.wait_for("half a line")
    chat.press_ctrl_c()
    chat.wait_for("Ctrl-C again leaves")
    chat.wait_for("main>")
    chat.type("/stats\r")
    chat.wait_for("main: 1 turn")
    chat.wait_for("main>")
    chat.press_ctrl_c()
    chat.wait_for("Ctrl-C again leaves")
    chat.wait_for("main>")
    chat.press_ctrl_c()
    chat.wait_for("interrupted")
    assert chat.end() == 130


@pytest.mark.slow
def test_ctrl_z_at_the_prompt_and_while_it_answers(terminal):
    # A shell with job control brings each stopped chat back to the front.
    shell = "set -m; %s; echo STOPPED ONCE; fg; echo STOPPED TWICE; fg; echo LEFT $?"
    chat = terminal(*ENDLESS, shell=shell)
    chat.wait_for("main>")
    chat.type(words(5))
    chat.wait_for("w5")
    chat.type("\x1a")
    chat.wait_for("STOPPED ONCE")
    # The line that was begun is still there.
    chat.wait_for("main> w5")
    chat.type(f" {words(17)}\r")
    for _ in range(5):
        chat.wait_for(" w")
    chat.type("\x1a")
    chat.wait_for("STOPPED TWICE")
    for _ in range(5):
        chat.wait_for(" w")
    chat.type("\x03")
    chat.wait_for("interrupted; the answer stays as it is")
    chat.wait_for("main>")
    chat.type("/stats\r")
    chat.wait_for("main: 1 turn")
    chat.wait_for("main>")
    chat.type("\x04")
    chat.wait_for("LEFT 0")


@pytest.mark.slow
def test_an_output_that_goes_elsewhere_gets_answers_alone(terminal, tmp_path):
    answers = tmp_path / "answers"
    chat = terminal("--prefill-step", "50", shell=f"exec %s > {answers}")
    chat.wait_for("main>")
    chat.paste(words(*(3 + number % 90 for number in range(300))))
    chat.type("\r")
    shown = chat.wait_for(CUT)
    assert "reading the prompt" in shown
    assert "306/306" in shown
    chat.wait_for("main>")
    assert "reading the prompt" not in say(chat, words(5))
    chat.type("/quit\r")
    assert chat.end() == 0
    assert re.fullmatch(r"((w\d+ ){5}w\d+\n){2}", answers.read_text())


def test_commands_are_completed_at_the_beginning_of_a_message():
    completer = CommandCompleter({name: each.purpose for name, each in COMMANDS.items()})

    def completed(text):
        return [each.text for each in completer.get_completions(Document(text), None)]

    assert completed("/") == list(COMMANDS)
    assert completed("/fo") == ["/fork", "/forks"]
    assert completed("/save") == ["/save"]
    for text in ("", "fo", "x /fo", "/fork ", "/nope", "//fo"):
        assert completed(text) == []


def test_the_history_of_two_chats_is_kept_and_bounded(tmp_path, monkeypatch):
    path = tmp_path / "state" / "history"
    one, other = MessageHistory(path), MessageHistory(path)
    one.store_string("first")
    other.store_string("two\nlines \\n é\u2603")
    one.store_string("third")
    assert list(one.load_history_strings()) == ["third", "two\nlines \\n é\u2603", "first"]
    assert len(path.read_text().split("\n")) == 4
    monkeypatch.setattr("mlx_kvcache.commands.chat_terminal._HISTORY_ENTRIES", 2)
    one.store_string("fourth")
    assert list(other.load_history_strings()) == ["fourth", "third"]
    path.write_bytes(b"\xff broken\nfifth\n")
    assert list(one.load_history_strings()) == ["fifth", "\ufffd broken"]


def test_the_history_is_for_its_owner_whatever_it_was(tmp_path):
    path = tmp_path / "history"
    path.write_text("before\n")
    path.chmod(0o644)
    MessageHistory(path).store_string("secret")
    assert path.read_text() == "before\nsecret\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = tmp_path / "link"
    link.symlink_to(path)
    MessageHistory(link).store_string("another")
    assert path.read_text().splitlines()[-1] == "another"
    assert link.is_symlink()


def test_a_history_that_cannot_be_kept_is_no_reason_to_stop(tmp_path):
    (tmp_path / "file").write_text("in the way")
    history = MessageHistory(tmp_path / "file" / "history")
    assert list(history.load_history_strings()) == []
    history.store_string("hello")
    assert list(history.load_history_strings()) == []
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    MessageHistory(loop).store_string("hello")
    assert loop.is_symlink()
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.slow
def test_what_edits_messages_is_imported_on_a_terminal_only():
    code = (
        "import sys\n"
        "from mlx_kvcache.commands import app, chat_input\n"
        "chat_input.reader({})\n"
        "print('prompt_toolkit' in sys.modules)\n"
        "import mlx_kvcache.commands.chat_terminal\n"
        "print('prompt_toolkit' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout.split() == ["False", "True"]
