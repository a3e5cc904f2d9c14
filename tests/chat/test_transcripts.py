"""What /save writes, /load reads, token by token; all else is refused and changes nothing."""

from __future__ import annotations

import json

import pytest

from mlx_kvcache.chat.transcript import messages_of, read_transcript, vocabulary_size
from mlx_kvcache.errors import CapacityError, ConfigError, TranscriptError
from tests.support.cold_runs import check_answer, check_cache, fed, greedy, say
from tests.support.tiny_models_on_disk import FORGETFUL, TEMPLATE, words

TEXTS = (words(5, 17), words(40, 33, 8), words(61))


def save(conversation, path):
    messages = messages_of(conversation.transcript, conversation.answer_text)
    path.write_text("".join(json.dumps(message) + "\n" for message in messages))
    return path


def load(conversation, path):
    size = vocabulary_size(conversation.cached.model, conversation.tokenizer)
    saved = read_transcript(path, size, conversation.answer_text)
    conversation.load(saved)


def state(conversation):
    return (
        conversation.options,
        conversation.turns,
        list(conversation.tokens),
        conversation.history.held,
    )


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL, None], ids=["kept", "rewritten", "raw"])
def test_a_saved_conversation_comes_back_token_by_token(begin, tmp_path, monkeypatch, template):
    conversation = begin("llama", template, system=None if template is None else words(60))
    for text in TEXTS:
        say(conversation, text)
    path = save(conversation, tmp_path / "chat.jsonl")
    other = begin("llama", template)
    say(other, words(70))
    load(other, path)
    assert other.tokens == conversation.tokens
    assert other.turns == conversation.turns
    assert other.options.system == conversation.options.system
    steps = fed(other, monkeypatch)
    mine, theirs = say(conversation, words(22)), say(other, words(22))
    monkeypatch.undo()
    # Only what both conversations begin with was in the cache.
    assert sum(steps) >= len(other.tokens) - 8
    assert mine == theirs
    assert other.tokens == conversation.tokens
    check_answer(other)
    check_cache(other)
    other.undo()
    check_cache(other)
    again = save(other, tmp_path / "again.jsonl")
    # The turn that was undone has had the answer before it written otherwise.
    assert (again.read_text() == path.read_text()) == (template != FORGETFUL)


def test_answers_in_tokens_that_encoding_does_not_give_come_back(begin, tmp_path):
    conversation = begin(template=None)
    for text in TEXTS[:2]:
        say(conversation, text)
    conversation.drop(8)
    assert [turn.end for turn in conversation.turns] == ["length", "undone"]
    assert conversation.turns[1].answer == ()
    say(conversation, words(7))
    other = begin(template=None)
    load(other, save(conversation, tmp_path / "chat.jsonl"))
    assert (other.turns, other.tokens) == (conversation.turns, conversation.tokens)
    assert say(other, words(9)) == say(conversation, words(9))
    retold = begin(template=None)
    say(retold, words(9))
    load(retold, tmp_path / "chat.jsonl")
    for _ in retold.retry():
        pass
    turn = retold.turns[-1]
    assert turn.answer == conversation.turns[2].answer
    model = retold.cached.model
    assert list(turn.answer) == greedy(model, retold.tokens[: turn.answer_start], 6)


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def changed(number, **fields):
    def change(lines):
        message = {**json.loads(lines[number - 1]), **fields}
        kept = {name: value for name, value in message.items() if value is not None}
        return [*lines[: number - 1], json.dumps(kept).encode() + b"\n", *lines[number:]]

    return change


DAMAGES = {
    "nothing in it": (lambda _: [], "is empty"),
    "cut within a line": (lambda lines: [*lines[:2], lines[2][:-9]], "line 3 of .* cut short"),
    "cut behind a line": (lambda lines: lines[:2], "line 2 of .* first says that there are 5"),
    "a line too many": (lambda lines: [*lines, lines[-2]], "line 6 of .* says that there are 5"),
    "no JSON": (lambda lines: [lines[0], b"{'a'}\n", *lines[2:]], "line 2 of .* is not JSON"),
    "deep JSON": (lambda lines: [b"[" * 100_000 + b"\n", *lines[1:]], "line 1 of .* is not JSON"),
    "no UTF-8": (lambda lines: [b"\xff\xfe\n", *lines[1:]], "line 1 of .* is not JSON"),
    "no message": (lambda lines: [lines[0], b"3\n", *lines[2:]], "line 2 of .* is not a message"),
    "another JSONL": (lambda _: [b'{"prompt": "hello"}\n'], "line 1 of .* how many messages"),
    "no count": (changed(1, messages=None), "line 1 of .* how many messages"),
    "a boolean count": (changed(1, messages=True), "line 1 of .* how many messages"),
    "another role": (changed(4, role="tool"), "line 4 of .* message of 'tool'"),
    "a second system": (changed(4, role="system"), "line 4 of .* message of 'system'"),
    "an answer first": (changed(1, role="assistant"), "line 1 of .* message of 'assistant'"),
    "two answers": (changed(4, role="assistant"), "line 4 of .* message of 'assistant'"),
    "no content": (changed(4, content=None), "line 4 of .* has no content"),
    "a number for content": (changed(3, content=3), "line 3 of .* has no content"),
    "no tokens": (changed(4, token_ids=None), "line 4 of .* has no token_ids"),
    "an empty answer": (changed(3, token_ids=[]), "line 3 of .* has no token_ids"),
    "text for tokens": (changed(3, token_ids=["5"]), "line 3 of .* has no token_ids"),
    "booleans for tokens": (changed(3, token_ids=[True]), "line 3 of .* has no token_ids"),
    "a token too high": (changed(2, token_ids=[5, 96]), "line 2 of .* the token 96 .* has 96"),
    "a negative token": (changed(3, token_ids=[-1]), "line 3 of .* the token -1"),
    "other tokens": (changed(3, token_ids=[5, 6]), "line 3 of .* do not spell here"),
    "another text": (changed(5, content="w5"), "line 5 of .* do not spell here"),
    "another end": (changed(5, finish_reason="x"), "line 5 of .* finish_reason 'x'"),
    "bad kept tokens": (changed(3, kept_token_ids=[1.5]), "line 3 of .* has no kept_token_ids"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_whole_or_not_ours_is_refused(begin, tmp_path, damage):
    change, message = DAMAGES[damage]
    conversation = begin(system=words(60))
    for text in TEXTS[:2]:
        say(conversation, text)
    path = save(conversation, tmp_path / "chat.jsonl")
    whole = lines_of(path)
    assert len(whole) == 5
    path.write_bytes(b"".join(change(whole)))
    assert path.read_bytes() != b"".join(whole)
    other = begin()
    say(other, words(70))
    before = state(other)
    with pytest.raises(TranscriptError, match=message):
        load(other, path)
    assert state(other) == before
    check_cache(other)
    path.write_bytes(b"".join(whole))
    load(other, path)
    assert other.tokens == conversation.tokens


def test_what_does_not_fit_changes_nothing(begin, tmp_path):
    conversation = begin(system=words(60))
    for text in TEXTS:
        say(conversation, text)
    path = save(conversation, tmp_path / "chat.jsonl")
    count = len(conversation.tokens)
    small = begin(capacity=count, capacity_source=" (--capacity)")
    say(small, words(70))
    before = state(small)
    with pytest.raises(CapacityError, match=f"{count} tokens .* capacity is {count} .--capacity"):
        load(small, path)
    assert state(small) == before
    load(begin(capacity=count + 1), path)
    raw = begin(raw=True)
    with pytest.raises(ConfigError, match="no chat template to put a system prompt into"):
        load(raw, path)
    assert raw.tokens == []


def test_the_command_saves_and_loads(chat, directories, tmp_path):
    path, short = tmp_path / "chat.jsonl", ("--max-tokens", "6")
    lines = f"{TEXTS[0]}\n{TEXTS[1]}\n/save {path}\n{TEXTS[2]}\n"
    told = chat(directories(), lines, *short)
    assert told.exit_code == 0, told.stderr
    retold = chat(directories(), f"/load {path}\n{TEXTS[2]}\n", *short)
    assert retold.exit_code == 0, retold.stderr
    assert retold.stdout.splitlines() == told.stdout.splitlines()[2:]
    assert f"this is {path}, at 2 turns, 29 tokens; the next turn reads 29 of them" in retold.stderr
    path.write_bytes(path.read_bytes()[:-3])
    torn = chat(directories(), f"{TEXTS[2]}\n/load {path}\n/load {tmp_path}/none\n", *short)
    assert torn.exit_code == 2
    assert f"error: line 4 of {path} has no end; the file is cut short" in torn.stderr
    assert "No such file or directory" in torn.stderr
    assert len(torn.stdout.splitlines()) == 1
    nothing = chat(directories(), f"/save {tmp_path}/new\n", *short)
    assert "nothing to save" in nothing.stderr
    assert not (tmp_path / "new").exists()
