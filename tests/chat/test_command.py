"""`mlx-kvcache chat` over a pipe: transcripts, commands, refusals and what goes where."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mlx_kvcache.commands.chat_commands import COMMANDS
from mlx_kvcache.commands.chat_input import history_path
from tests.support.cold_runs import greedy
from tests.support.processes import finish, start
from tests.support.tiny_models_on_disk import words

SHORT = ("--max-tokens", "6")


def spoken(tokens):
    return " ".join(f"w{token}" for token in tokens)


def lines_of(*lines):
    return "".join(f"{line}\n" for line in lines)


def said(result):
    """The lines on standard error, without the notice that each short answer was cut."""
    return [
        line
        for line in result.stderr.splitlines()
        if line != "the answer was cut at 6 tokens (--max-tokens)"
    ]


@pytest.fixture
def answers(loaded):
    """The answers of a cold run to some texts, each asked after the ones before it."""
    model, _ = loaded()

    def expected(*texts):
        tokens, found = [1], []
        for number, text in enumerate(texts):
            close = [95] if number else []
            numbers = [int(word[1:]) for word in text.split()]
            tokens += [*close, 94, 92, *numbers, 95, 94, 93]
            found.append(greedy(model, tokens, 6))
            tokens += found[-1]
        return found

    return expected


def test_the_answers_alone_are_on_standard_output(chat, directories, answers):
    texts = (words(5, 17), words(40), words(61))
    result = chat(directories(), lines_of(*texts), *SHORT)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [spoken(each) for each in answers(*texts)]
    assert said(result) == []
    other = chat(directories(), lines_of(words(6, 17), *texts[1:]), *SHORT)
    assert other.stdout != result.stdout


def test_undo_takes_a_turn_back(chat, directories, answers):
    result = chat(
        directories(), lines_of(words(5), words(6), "/undo", words(7), "/undo", "/undo"), *SHORT
    )
    assert result.exit_code == 0, result.stderr
    first, second = answers(words(5), words(6))
    _, instead = answers(words(5), words(7))
    assert second != instead
    assert result.stdout.splitlines() == [spoken(each) for each in (first, second, instead)]
    assert said(result) == [
        "back to 1 turn, 13 tokens",
        "back to 1 turn, 13 tokens",
        "back to 0 turns, 0 tokens",
    ]


def test_undo_of_tokens(chat, directories, loaded):
    result = chat(
        directories(), lines_of(words(5), "/undo 2", words(6), "/undo 1000", words(5)), *SHORT
    )
    assert result.exit_code == 0, result.stderr
    first, second, again = result.stdout.splitlines()
    assert said(result) == ["back to 1 turn, 11 tokens", "back to 0 turns, 0 tokens"]
    assert again == first
    kept = [int(word[1:]) for word in first.split()][:4]
    prompt = [1, 94, 92, 5, 95, 94, 93, *kept, 95, 94, 92, 6, 95, 94, 93]
    assert second == spoken(greedy(loaded()[0], prompt, 6))


def test_undo_beyond_the_rings_reads_again_and_the_next_turn_is_right(chat, directories):
    texts = (words(*range(20, 40)), words(5))
    lines = lines_of(*texts, "/undo 9", words(7))
    result = chat(directories(), lines, *SHORT, "--spare", "4")
    assert result.exit_code == 0, result.stderr
    assert said(result) == [
        "the cache can go back to 32 only; the next turn reads 4 tokens again",
        "back to 2 turns, 36 tokens",
    ]
    wide = chat(directories(), lines, *SHORT, "--spare", "60")
    assert said(wide) == ["back to 2 turns, 36 tokens"]
    assert result.stdout == wide.stdout
    within = chat(directories(), lines_of(*texts, "/undo 4", words(7)), *SHORT, "--spare", "4")
    assert said(within) == ["back to 2 turns, 41 tokens"]
    assert within.stdout != result.stdout


@pytest.mark.parametrize("command", ["/undo", "/undo 3", "/retry"])
def test_an_empty_conversation_says_so_and_goes_on(chat, directories, answers, command):
    result = chat(directories(), lines_of(command, words(5)), *SHORT)
    assert result.exit_code == 2
    (refusal,) = said(result)
    assert refusal.startswith("error: there is no turn to ")
    assert "the conversation is empty" in refusal
    assert result.stdout.splitlines() == [spoken(each) for each in answers(words(5))]


def test_retry_answers_the_newest_turn_anew(chat, directories, answers):
    lines = lines_of(words(5), words(6), "/retry", words(7))
    greedy_chat = chat(directories(), lines, *SHORT)
    assert greedy_chat.exit_code == 0, greedy_chat.stderr
    first, second, third = answers(words(5), words(6), words(7))
    expected = [spoken(each) for each in (first, second, second, third)]
    assert greedy_chat.stdout.splitlines() == expected
    assert said(greedy_chat) == [
        "sampling is greedy, so the same answer is to be expected; --temp makes others"
    ]
    hot = chat(directories(), lines, *SHORT, "--temp", "1.5", "--seed", "3")
    assert said(hot) == []
    one, two, again, _ = hot.stdout.splitlines()
    assert two != again
    assert hot.stdout == chat(directories(), lines, *SHORT, "--temp", "1.5", "--seed", "3").stdout
    assert one == hot.stdout.splitlines()[0]


def test_reset(chat, directories):
    result = chat(directories(), lines_of(words(5), words(6), "/reset", words(5)), *SHORT)
    first, second, again = result.stdout.splitlines()
    assert first == again != second
    assert said(result) == ["the conversation is empty; the cache keeps its memory"]


def test_forks(chat, directories, answers):
    result = chat(
        directories(),
        lines_of(
            words(5), "/fork side", words(6), "/switch side", words(7), "/forks",
            "/switch main", words(8), "/fork side", "/switch none", "/fork", "/switch a b",
        ),
        *SHORT,
    )  # fmt: skip
    assert result.exit_code == 2
    first, second, last = answers(words(5), words(6), words(8))
    _, aside = answers(words(5), words(7))
    assert result.stdout.splitlines() == [spoken(each) for each in (first, second, aside, last)]
    assert said(result) == [
        "side is a copy of main, 1 turn, 13 tokens; /switch side goes there",
        "this is side, at 1 turn, 13 tokens",
        "  main: 2 turns, 26 tokens",
        "* side: 2 turns, 26 tokens",
        "this is main, at 2 turns, 26 tokens",
        "error: there is a conversation side already; choose another name, or /switch side",
        "error: there is no conversation none; there are: main, side",
        "error: usage: /fork NAME (copy the conversation under a name, and stay in this one)",
        "error: usage: /switch NAME (go to another conversation)",
    ]


def test_stats(chat, directories):
    result = chat(directories(), lines_of("/stats", words(5), "/fork a", "/stats"), *SHORT)
    lines = said(result)
    assert lines[0] == "chat    main: 0 turns, 0 tokens, 0 of them in the cache; 0 other " + (
        "conversations"
    )
    assert lines[1].startswith("cache   2 flat + 2 ring(8) layers, 0/512 positions, 0 B used of ")
    assert lines[2].startswith("memory  MLX ")
    assert lines[3] == "undo    positions that can be reached: any"
    assert lines[5] == "chat    main: 1 turn, 13 tokens, 13 of them in the cache; 1 other " + (
        "conversation"
    )
    assert lines[6].startswith("cache   2 flat + 2 ring(8) layers, 13/512 positions, ")
    assert result.stdout.count("\n") == 1
    rings = chat(directories(), lines_of(words(*range(20, 40)), "/stats"), *SHORT, "--spare", "4")
    assert said(rings)[3] == (
        "undo    positions that can be reached: 28 and up, 0, 25 (5.5 KiB kept)"
    )
    hybrid = chat(directories("qwen3_next"), lines_of(words(5), "/stats"), *SHORT)
    line = said(hybrid)[3]
    assert line.startswith("states  recurrent layers hold ")
    assert line.endswith(" for each position they can go back to: 0, 6, 12, 13")


def test_save_writes_the_conversation_as_json_lines(chat, directories, tmp_path):
    path = tmp_path / "a chat.jsonl"
    lines = lines_of(words(5) + "\r", words(6), "/undo 2", f"/save '{path}'")
    result = chat(directories(), lines, *SHORT, "--system", words(60))
    assert result.exit_code == 0, result.stderr
    assert said(result)[-1] == f"5 messages written to {path}"
    saved = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["role"], line["content"]) for line in saved[:2]] == [
        ("system", "w60"),
        ("user", "w5"),
    ]
    printed = result.stdout.splitlines()
    assert saved[2]["content"] == printed[0] == spoken(saved[2]["token_ids"])
    assert saved[2]["finish_reason"] == "length"
    assert saved[4]["finish_reason"] == "undone"
    assert saved[4]["content"].split() == printed[1].split()[:4]
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_save_leaves_what_is_no_plain_file_and_follows_links(chat, directories, tmp_path):
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    target.write_text("old")
    link.symlink_to(target)
    lines = lines_of(words(5), f"/save {pipe} --force", f"/save {link} --force")
    result = chat(directories(), lines, *SHORT)
    assert "no plain file" in result.stderr
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == 2


def test_save_overwrites_only_when_it_is_told_to(chat, directories, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("mine")
    result = chat(directories(), lines_of(words(5), f"/save {path}"), *SHORT)
    assert result.exit_code == 2
    assert said(result) == [f"error: {path} exists; add --force to overwrite it"]
    assert path.read_text() == "mine"
    result = chat(directories(), lines_of(words(5), f"/save --force {path}"), *SHORT)
    assert result.exit_code == 0
    assert len(path.read_text().splitlines()) == 2
    missing = tmp_path / "none" / "chat.jsonl"
    result = chat(directories(), lines_of(words(5), f"/save {missing}", words(6)), *SHORT)
    assert result.exit_code == 2
    assert "No such file or directory" in said(result)[0]
    assert len(result.stdout.splitlines()) == 2
    assert [path] == list(tmp_path.iterdir())


def test_help_and_unknown_commands_list_all(chat, directories):
    result = chat(directories(), lines_of("/help", "/nope 3", "/undo x", "/save", '/save "a'))
    assert result.exit_code == 2
    lines = said(result)
    for line, (name, command) in zip(lines, COMMANDS.items(), strict=False):
        assert line.startswith(command.usage)
        assert command.usage.split()[0] == name
        assert line.endswith(command.purpose)
    assert str(history_path()) in lines[len(COMMANDS) + 2]
    rest = lines[len(COMMANDS) + 3 :]
    assert rest[0].startswith(f"error: there is no command /nope; there are: {', '.join(COMMANDS)}")
    assert rest[1].startswith("error: usage: /undo [N]")
    assert rest[2].startswith("error: usage: /save FILE [--force]")
    assert rest[3].startswith("error: the command cannot be read: No closing quotation")
    assert len(rest) == 4
    assert result.stdout == ""


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_leaving_leaves_the_rest_unread(chat, directories, leave):
    result = chat(directories(), lines_of(words(5), leave, words(6)), *SHORT)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1


MISUSES = ("/reset now", "/forks 1", "/stats x", "/help me", "/quit now", "/undo -1", "/undo 0")
MISUSES += (
    "/undo 1 2",
    "/undo 1.5",
    "/undo two",
    "/save a b",
    "/save --force",
    "/save ''",
    "/retry 2",
    "/load",
    "/load ''",
    "/load a b",
    "/exit now",
    "/save",
    f"/undo {'9' * 5000}",
    "/save ~nobody-of-this-name/x",
    "/load ~nobody-of-this-name/x",
    "/save 'a\0b'",
    "/load 'a\0b'",
    "/save loop --force",
    "/load loop",
    f"/save {'x' * 300}",
    "/save /dev/stdout --force",
    "/save /dev/fd/1 --force",
)


@pytest.mark.parametrize("misuse", MISUSES)
def test_misused_commands_change_nothing(chat, directories, answers, misuse, tmp_path, monkeypatch):
    directory = directories()
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    result = chat(directory, lines_of(words(5), misuse, words(6)), *SHORT)
    assert result.exit_code == 2
    assert len(said(result)) == 1
    assert os.listdir() == ["loop"]
    assert result.stdout.splitlines() == [spoken(each) for each in answers(words(5), words(6))]


def test_blank_lines_and_slashes_and_a_last_line_without_an_end(chat, directories, answers):
    text = f"\n   \n{words(5)}\r\n\n//x {words(6)}"
    result = chat(directories(), text, *SHORT)
    assert result.exit_code == 0, result.stderr
    first, _ = result.stdout.splitlines()
    assert first == spoken(answers(words(5))[0])
    # The tokenizer does not know "/x", but the model was asked.
    assert said(result) == []


def test_a_line_that_is_not_utf8_is_refused(chat, directories):
    result = chat(directories(), b"\xff\xfe\n" + words(5).encode() + b"\n", *SHORT)
    assert result.exit_code == 2
    assert said(result)[0].startswith("error: the line is not valid UTF-8 (invalid start byte")
    assert len(result.stdout.splitlines()) == 1


def test_a_turn_that_does_not_fit_is_refused_with_the_numbers(chat, directories):
    lines = lines_of(words(5), words(6), "/undo 3", words(6))
    result = chat(directories(), lines, "--capacity", "18", *SHORT)
    assert result.exit_code == 2
    refusal, back, cut = said(result)
    assert refusal == (
        "error: the turn needs 7 more positions and 1 for an answer, 21 with the 13 before, but "
        "the capacity is 18 (--capacity); take turns back, start again, or use a larger capacity"
    )
    assert back == "back to 1 turn, 10 tokens"
    assert cut == (
        "the answer was cut: all 18 positions of the cache are taken (--capacity); /undo, /reset, "
        "or a larger --capacity make room"
    )
    assert len(result.stdout.splitlines()[1].split()) == 1


def test_options_reach_the_model_and_the_cache(chat, directories, loaded):
    raw = chat(directories(), lines_of(words(5)), *SHORT, "--raw")
    assert raw.stdout.split() == spoken(greedy(loaded()[0], [1, 5], 6)).split()
    hot = ("--temp", "1.5", "--top-p", "0.95", "--seed")
    one, again, other = (
        chat(directories(), lines_of(words(5), words(6)), *SHORT, *hot, seed).stdout
        for seed in ("7", "7", "8")
    )
    assert one == again != other
    narrow = chat(
        directories(), lines_of("/stats"), "--windows", "6", "--kv-dtype", "bfloat16",
        "--initial-capacity", "16", "--spare", "2", "--capacity", "64",
    )  # fmt: skip
    assert "2 flat + 2 ring(6) layers, 0/64 positions" in narrow.stderr
    for flag, value in (("--max-tokens", "0"), ("--temp", "-1"), ("--capacity", "0")):
        refused = chat(directories(), "", flag, value)
        assert refused.exit_code == 2
        assert flag in refused.stderr
    both = chat(directories(), "", "--raw", "--system", "w5")
    assert both.exit_code == 2
    assert "--system needs the chat template" in both.stderr
    system = chat(directories(), lines_of(words(5)), "--system", "w9")
    assert system.exit_code == 2
    assert "leave --system out" in system.stderr
    assert system.stdout == ""


def test_an_empty_pipe_ends_at_once(chat, directories):
    result = chat(directories(), "")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(directories):
    read, write = os.pipe()
    endless = ("--max-tokens", "1000000", "--capacity", "1100000")
    pipe = subprocess.PIPE
    arguments = ("chat", "--model", directories(), *endless)
    process = start(*arguments, stdin=pipe, stdout=write, stderr=pipe)
    os.close(write)
    process.stdin.write(words(5) + "\n")
    process.stdin.flush()
    assert os.read(read, 1) == b"w"
    os.close(read)
    _, errors = finish(process)
    assert (process.returncode, errors) == (141, "")
