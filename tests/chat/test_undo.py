"""Taking turns and tokens back: what can be reached, what is refused, and that it goes on right."""

from __future__ import annotations

import pytest

from mlx_kvcache.errors import ConfigError, RewindError
from tests.support.cold_runs import check_answer, check_cache, say
from tests.support.tiny_models_on_disk import words

FAMILIES = ("llama", "gemma3_text", "qwen3_next")
#: Rings of window 8 with 16 spare rows have 23, so each of these conversations wraps them.
SPARE = 16


def snapshot(conversation):
    cached = conversation.cached
    return (
        list(conversation.tokens),
        conversation.turns,
        conversation.history.held,
        cached.sequence.length,
        cached.sequence.rewind_floor,
        [layer.offset for layer in cached.sequence.layers],
        tuple(cached.states),
    )


def wrapped(begin, family, template, **options):
    """A conversation of 3 turns, the newest of which is shorter than the spare rows."""
    conversation = begin(family, *template, spare=SPARE, **options)
    for text in (words(*range(20, 40)), words(5, 17, 40, 11), words(61)):
        say(conversation, text)
    assert len(conversation.tokens) > 8 + SPARE
    assert len(conversation.tokens) - conversation.turns[2].start <= SPARE
    return conversation


TEMPLATES = pytest.mark.parametrize("template", [(), (None,)], ids=["template", "raw"])


@pytest.mark.slow
@TEMPLATES
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_after_a_ring_wrap_within_the_spare_rows(begin, family, template):
    conversation = wrapped(begin, family, template)
    sequence = conversation.cached.sequence
    if family != "qwen3_next":
        assert 0 < sequence.rewind_floor <= conversation.turns[2].start
    before = conversation.tokens[: conversation.turns[2].start]
    undone = conversation.undo()
    assert undone.user == words(61)
    assert conversation.tokens == before
    assert len(conversation.turns) == 2
    check_cache(conversation)
    again = say(conversation, words(61))
    assert again == undone.answer
    conversation.undo()
    other = say(conversation, words(70, 71))
    assert other != undone.answer
    check_answer(conversation)
    check_cache(conversation)


@TEMPLATES
def test_undo_beyond_the_spare_rows_is_refused_and_changes_nothing(begin, template):
    conversation = wrapped(begin, "llama", template)
    conversation.undo()
    state = snapshot(conversation)
    assert conversation.cached.sequence.rewind_floor > conversation.turns[1].start
    with pytest.raises(RewindError, match="a sliding-window layer has overwritten rows"):
        conversation.undo()
    assert snapshot(conversation) == state
    check_cache(conversation)
    say(conversation, words(8, 9))
    check_answer(conversation)
    check_cache(conversation)


def test_more_spare_rows_reach_further(begin):
    conversation = begin("llama", spare=60)
    for text in (words(*range(20, 40)), words(5, 17, 40), words(61)):
        say(conversation, text)
    conversation.undo()
    conversation.undo()
    assert len(conversation.turns) == 1
    check_cache(conversation)
    say(conversation, words(8))
    check_answer(conversation)


def test_each_bare_undo_takes_one_turn_more(begin):
    conversation = begin()
    starts = []
    for text in (words(5), words(6), words(7)):
        starts.append(len(conversation.tokens))
        say(conversation, text)
    for left in (2, 1, 0):
        conversation.undo()
        assert len(conversation.turns) == left
        assert len(conversation.tokens) == starts[left]
        check_cache(conversation)
    with pytest.raises(RewindError, match="no turn to undo"):
        conversation.undo()
    say(conversation, words(5))
    check_answer(conversation)


@pytest.mark.slow
@TEMPLATES
@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8, 9, 12, 13, 14, 20, 1000])
def test_dropping_tokens(begin, template, count):
    conversation = begin("llama", *template)
    for text in (words(5, 17, 40), words(61, 62)):
        say(conversation, text)
    old = list(conversation.tokens)
    conversation.drop(count)
    assert conversation.tokens == old[: max(0, len(old) - count)]
    check_cache(conversation)
    for turn in conversation.turns:
        assert turn.start < len(conversation.tokens)
        answer = conversation.tokens[turn.answer_start : turn.answer_start + len(turn.answer)]
        assert tuple(answer) == turn.answer
    kept = list(conversation.tokens)
    say(conversation, words(8))
    check_answer(conversation)
    check_cache(conversation)
    if template:
        assert conversation.tokens[: len(kept)] == kept
    said = [(turn.user, conversation.answer_text(turn)) for turn in conversation.turns[:-1]]
    if not template:
        fresh = begin("llama")._script.write(said, [], words(8))
        assert conversation.tokens[: conversation.turns[-1].answer_start] == fresh


def test_dropping_cuts_the_answer_that_it_reaches(begin):
    conversation = begin()
    say(conversation, words(5))
    (before,) = conversation.turns
    conversation.drop(2)
    (turn,) = conversation.turns
    assert (turn.answer, turn.end) == (before.answer[:4], "undone")
    assert conversation.answer_text(turn).split() == [f"w{token}" for token in before.answer[:4]]
    conversation.drop(4)
    (turn,) = conversation.turns
    assert (turn.answer, turn.end) == ((), "undone")
    # The same words again: all their tokens are held, and the last is fed once more.
    assert say(conversation, words(5)) == before.answer
    assert len(conversation.turns) == 1
    check_cache(conversation)
    conversation.drop(8)
    assert len(conversation.turns) == 1
    conversation.undo()
    assert conversation.tokens == []


def test_undo_after_a_drop_into_a_question_goes_to_its_start(begin):
    for template in ((), (None,)):
        conversation = begin("llama", *template)
        say(conversation, words(5, 17))
        start = len(conversation.tokens)
        say(conversation, words(40, 41, 42))
        conversation.drop(8)
        assert len(conversation.tokens) > start
        assert len(conversation.turns) == 2
        if template:
            assert conversation.turns[1].user == words(40)
        conversation.undo()
        assert len(conversation.tokens) == start
        check_cache(conversation)


def test_a_drop_beyond_the_spare_rows_is_refused_and_changes_nothing(begin):
    conversation = wrapped(begin, "llama", ())
    state = snapshot(conversation)
    conversation_floor = conversation.cached.sequence.rewind_floor
    furthest = len(conversation.tokens) - conversation_floor
    with pytest.raises(RewindError, match="overwritten"):
        conversation.drop(furthest + 1)
    assert snapshot(conversation) == state
    conversation.drop(furthest)
    assert len(conversation.tokens) == conversation_floor
    check_cache(conversation)
    say(conversation, words(8))
    check_answer(conversation)
    conversation.drop(10_000)
    assert conversation.tokens == []
    check_cache(conversation)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "3"])
def test_drops_that_cannot_be(begin, count):
    conversation = begin()
    say(conversation, words(5))
    state = snapshot(conversation)
    with pytest.raises(ConfigError, match="number of tokens to drop must be at least 1"):
        conversation.drop(count)
    assert snapshot(conversation) == state


def test_recurrent_layers_go_back_to_turn_starts_only(begin):
    conversation = begin("qwen3_next")
    for text in (words(5, 17), words(40), words(61)):
        say(conversation, text)
    state = snapshot(conversation)
    starts = ", ".join(str(turn.start) for turn in conversation.turns)
    with pytest.raises(RewindError, match=f"recurrent layers.*; {starts}, .*can be reached"):
        conversation.drop(3)
    assert snapshot(conversation) == state
    check_cache(conversation)
    # The number of tokens since a turn's start is as good as /undo.
    conversation.drop(len(conversation.tokens) - conversation.turns[1].start)
    assert len(conversation.turns) == 1
    check_cache(conversation)
    say(conversation, words(8))
    check_answer(conversation)
    conversation.drop(10_000)
    check_cache(conversation)


def test_recurrent_states_of_old_turns_are_let_go(begin, monkeypatch):
    monkeypatch.setattr("mlx_kvcache.chat.token_cache.MAX_KEPT", 2)
    conversation = begin("qwen3_next")
    for number in range(5):
        say(conversation, words(10 + number))
    assert len(conversation.cached.states) <= 2 + 1 + 2
    conversation.undo()
    conversation.undo()
    check_cache(conversation)
    state = snapshot(conversation)
    with pytest.raises(RewindError, match="recurrent layers"):
        conversation.undo()
    assert snapshot(conversation) == state
    say(conversation, words(8))
    check_answer(conversation)


@pytest.mark.parametrize("family", FAMILIES)
def test_reset_starts_again(begin, family):
    conversation = begin(family)
    first = say(conversation, words(5, 17))
    say(conversation, words(40))
    held = conversation.cached.sequence.nbytes
    conversation.reset()
    assert (conversation.tokens, conversation.turns) == ([], ())
    check_cache(conversation)
    assert conversation.cached.sequence.nbytes == held
    assert say(conversation, words(5, 17)) == first
    check_cache(conversation)
