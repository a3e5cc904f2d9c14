"""An answer that is broken off anywhere leaves tokens, turns and cache in agreement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_kvcache.chat import conversation as conversation_module
from mlx_kvcache.chat.checkpoints import RingCheckpoints
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer
from mlx_kvcache.models import load
from tests.support.cold_runs import check_answer, check_cache, greedy, say
from tests.support.interrupts import Interrupter
from tests.support.processes import finish, start
from tests.support.tiny_models_on_disk import words

FAMILIES = ("llama", "gemma3_text", "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_stop_ends_the_answer_after_its_next_token(begin, family, pieces):
    conversation = begin(family)
    say(conversation, words(5))
    for number, _ in enumerate(conversation.ask(words(6)), 1):
        if number == pieces:
            conversation.stop()
    turn = conversation.turns[1]
    assert (len(turn.answer), turn.end) == (pieces, "interrupted")
    check_answer(conversation)
    check_cache(conversation)
    say(conversation, words(7))
    check_answer(conversation)
    check_cache(conversation)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("read", [0, 8, 16])
def test_stop_while_the_turn_is_read_takes_it_out_again(begin, family, read):
    conversation = begin(family, prefill_step=8)
    say(conversation, words(5))
    tokens, turns = list(conversation.tokens), conversation.turns
    seen = []

    def progress(processed, total):
        seen.append((processed, total))
        if processed == read:
            conversation.stop()

    conversation.on_progress = progress
    assert list(conversation.ask(words(*range(20, 40)))) == []
    assert seen == [(count, 26) for count in range(0, read + 1, 8)]
    assert (conversation.tokens, conversation.turns) == (tokens, turns)
    check_cache(conversation)
    conversation.on_progress = None
    say(conversation, words(6))
    check_answer(conversation)
    check_cache(conversation)


def test_a_turn_that_cannot_be_taken_out_of_the_rings_is_read_again(begin, monkeypatch):
    conversation = begin("llama", prefill_step=8, spare=4)
    notices = []
    conversation.on_notice = notices.append
    first = say(conversation, words(5))
    tokens = list(conversation.tokens)

    def stop_late(processed, _total):
        if processed == 16:
            conversation.stop()

    conversation.on_progress = stop_late
    turn = words(*range(20, 40))
    pieces = conversation.ask(turn)
    assert list(pieces) == []
    assert notices == []
    check_cache(conversation)
    # The same where nothing was kept of the place before the turn.
    monkeypatch.setattr(RingCheckpoints, "take", lambda _: None)
    conversation.cached.checkpoints.keep(frozenset())
    assert list(conversation.ask(turn)) == []
    (notice,) = notices
    assert f"the next one reads {len(tokens)} tokens again" in notice
    assert (conversation.tokens, conversation.history.held) == (tokens, 0)
    assert [turn.answer for turn in conversation.turns] == [first]
    conversation.on_progress = None
    twin = conversation.fork()
    twin.undo()
    assert (twin.tokens, twin.turns) == ([], ())
    assert say(twin, words(5)) == first
    check_cache(twin)
    say(conversation, words(6))
    assert conversation.tokens[: len(tokens)] == tokens
    check_answer(conversation)
    check_cache(conversation)


def test_a_stop_before_the_answer_is_read_is_heard(begin):
    conversation = begin()
    pieces = conversation.ask(words(5))
    conversation.stop()
    assert list(pieces) == []
    assert conversation.turns == ()
    say(conversation, words(5))
    check_answer(conversation)


class Bomb:
    """Raises KeyboardInterrupt at the n-th call of a method, before or after its work."""

    def __init__(self, monkeypatch, owner, name, fuse, after):
        self.fuse = fuse
        self.exploded = False
        method = getattr(owner, name)

        def counted(*arguments):
            self.fuse -= 1
            now = self.fuse == 0
            self.exploded = self.exploded or now
            if now and not after:
                raise KeyboardInterrupt
            answer = method(*arguments)
            if now:
                raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(owner, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "owner", "name", "after"),
    [
        ("llama", MLXLMLayer, "update_and_fetch", False),
        ("llama", MLXLMLayer, "update_and_fetch", True),
        ("gemma3_text", MLXLMLayer, "update_and_fetch", True),
        ("qwen3_next", MLXLMLayer, "update_and_fetch", False),
        ("qwen3_next", ArraysCache, "__setitem__", True),
    ],
)
def test_an_interrupt_in_the_middle_of_any_step(begin, monkeypatch, family, owner, name, after):
    """Every layer of every step of a turn: of its prefill, its answer and the step run ahead."""
    fuse, exploded, kept = 0, True, set()
    while exploded:
        fuse += 1
        # The ring of 15 rows wraps in the first turn and once more in the second.
        conversation = begin(family, spare=8, prefill_step=5, max_tokens=3)
        say(conversation, words(*range(20, 32)))
        before = list(conversation.tokens)
        with monkeypatch.context() as patch:
            bomb = Bomb(patch, owner, name, fuse, after)
            pieces = conversation.ask(words(40, 41))
            try:
                for _ in pieces:
                    pass
            except KeyboardInterrupt:
                pass
            exploded = bomb.exploded
        assert len(conversation.turns) in (1, 2)
        answered = len(conversation.turns[1].answer) if conversation.turns[1:] else 0
        kept.add(answered)
        if not answered:
            assert conversation.tokens == before
        held = conversation.history.held
        # Broken off in the step of an answer's token, the cache lacks that one token.
        assert held >= len(conversation.tokens) - (answered > 0) or not held
        say(conversation, words(50))
        check_answer(conversation)
        if fuse % 5 == 0:
            check_cache(conversation)
    assert fuse > 12
    assert kept == {0, 1, 2, 3}


def start_chat(directory, *arguments):
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    arguments = ("chat", "--model", directory, *arguments)
    return start(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(directories, tmp_path, family):
    directory = directories(family, None)
    endless = ("--max-tokens", "1000000", "--capacity", "1100000", "--dtype", "float32")
    process = start_chat(directory, *endless)
    process.stdin.write(words(5, 17) + "\n")
    process.stdin.flush()
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    # The end of the line is the end of the answer.
    process.stdout.readline()
    process.stdin.write(words(40) + "\n")
    process.stdin.flush()
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    process.stdout.readline()
    saved = tmp_path / "chat.jsonl"
    _, errors = finish(process, f"/save {saved}\n/quit\n")
    assert process.returncode == 0, errors
    assert errors.count("interrupted; the answer stays as it is") == 2
    assert "Traceback" not in errors
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [line["role"] for line in lines] == ["user", "assistant"] * 2
    first, second = lines[1]["token_ids"], lines[3]["token_ids"]
    assert lines[1]["finish_reason"] == lines[3]["finish_reason"] == "interrupted"
    model, _ = load(directory)
    prompt = [1, 5, 17, *first, 40]
    count = min(len(second), 10)
    assert count > 2
    assert second[:count] == greedy(model, prompt, count)
    # Ctrl-C may come before the tenth.
    assert first[:10] == greedy(model, [1, 5, 17], min(len(first), 10))
    # One token more or less of the first answer, and the second is another.
    assert greedy(model, [1, 5, 17, *first[:-1], 40], 30) != greedy(model, prompt, 30)


@pytest.mark.slow
def test_a_second_ctrl_c_at_the_prompt_leaves(directories):
    process = start_chat(directories(), "--max-tokens", "20")
    process.stdin.write(words(5) + "\n")
    process.stdin.flush()
    assert process.stdout.readline()
    # The notice of the length follows the answer; then the chat waits for a line.
    assert "cut at 20 tokens" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "Ctrl-C again leaves; so does /quit\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = finish(process)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.slow
def test_a_turn_between_two_ctrl_c_stays(directories):
    process = start_chat(directories(), "--max-tokens", "2")
    for _ in range(3):
        process.stdin.write("/help\n" + words(5) + "\n")
        process.stdin.flush()
        assert process.stdout.readline()
        while "cut at 2 tokens" not in process.stderr.readline():
            pass
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "Ctrl-C again leaves; so does /quit\n"
    _, errors = finish(process)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("verb", ["undo", "drop", "reset", "load"])
def test_turns_and_tokens_agree_wherever_a_verb_is_interrupted(begin, verb):
    start = begin(max_tokens=3)
    for text in (words(5, 17), words(61), words(40)):
        say(start, text)
    saved = start.transcript
    say(start, words(33))

    def call(twin):
        arguments = {"drop": (7,), "load": (saved,)}.get(verb, ())
        getattr(twin, verb)(*arguments)

    def books(twin):
        return list(twin.tokens), twin.turns

    whole, first = start.fork(), Interrupter([conversation_module.__file__])
    before = books(whole)
    first.call(lambda: call(whole))
    after = books(whole)
    assert before != after
    seen = set()
    for number in range(len(first.lines)):
        twin = start.fork()
        with pytest.raises(KeyboardInterrupt):
            Interrupter([conversation_module.__file__], number).call(lambda twin=twin: call(twin))
        assert books(twin) in (before, after)
        seen.add(books(twin) == after)
        twin.close()
    assert False in seen
    whole.close()
    start.close()
