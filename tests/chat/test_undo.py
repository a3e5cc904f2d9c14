"""Taking turns and tokens back: what can be reached, what is refused, and that it goes on right."""

from __future__ import annotations

import pytest

from mlx_kvcache.errors import ConfigError, RewindError
from tests.support.cold_runs import check_answer, check_cache, fed, say
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
def test_undo_beyond_the_spare_rows_goes_back_to_what_was_kept(begin, template):
    conversation = wrapped(begin, "llama", template)
    conversation.undo()
    start = conversation.turns[1].start
    assert conversation.cached.sequence.rewind_floor > start
    assert start in conversation.cached.checkpoints.positions
    before = conversation.tokens[:start]
    conversation.on_notice = pytest.fail
    conversation.undo()
    assert conversation.tokens == before
    check_cache(conversation)
    say(conversation, words(8, 9))
    check_answer(conversation)
    check_cache(conversation)


@TEMPLATES
def test_undo_beyond_all_that_is_kept_reads_again(begin, template, monkeypatch):
    conversation = wrapped(begin, "llama", template)
    conversation.undo()
    conversation.cached.checkpoints.keep(frozenset())
    start = conversation.turns[1].start
    assert conversation.cached.sequence.rewind_floor > start
    notices = []
    conversation.on_notice = notices.append
    before = conversation.tokens[:start]
    conversation.undo()
    assert notices == [f"the cache can go back to 0 only; the next turn reads {start} tokens again"]
    assert conversation.tokens == before
    assert conversation.history.held == 0
    steps = fed(conversation, monkeypatch)
    say(conversation, words(8, 9))
    assert sum(steps) == len(conversation.tokens)
    monkeypatch.undo()
    assert len(notices) == 1
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


def test_a_drop_beyond_the_spare_rows_reads_again_from_the_place_before(begin, monkeypatch):
    conversation = wrapped(begin, "llama", ())
    sequence = conversation.cached.sequence
    furthest = len(conversation.tokens) - sequence.rewind_floor
    notices = []
    conversation.on_notice = notices.append
    conversation.drop(furthest)
    assert len(conversation.tokens) == sequence.rewind_floor
    assert notices == []
    check_cache(conversation)
    position = sequence.rewind_floor - 1
    place = max(each for each in conversation.cached.places() if each <= position)
    assert 0 < place < position
    conversation.drop(1)
    assert len(conversation.tokens) == position
    assert notices == [
        f"the cache can go back to {place} only; the next turn reads {position - place} tokens "
        "again"
    ]
    steps = fed(conversation, monkeypatch)
    say(conversation, words(8))
    assert sum(steps) == len(conversation.tokens) - place
    monkeypatch.undo()
    check_answer(conversation)
    check_cache(conversation)
    conversation.drop(10_000)
    assert conversation.tokens == []
    check_cache(conversation)


def test_an_empty_conversation_has_nothing_to_take_back(begin):
    conversation = begin()
    for take_back in (conversation.undo, lambda: conversation.drop(3)):
        with pytest.raises(RewindError, match="no turn to undo; the conversation is empty"):
            take_back()
    with pytest.raises(RewindError, match="no turn to answer anew; the conversation is empty"):
        conversation.retry()
    say(conversation, words(5))
    check_answer(conversation)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "3"])
def test_drops_that_cannot_be(begin, count):
    conversation = begin()
    say(conversation, words(5))
    state = snapshot(conversation)
    with pytest.raises(ConfigError, match="number of tokens to drop must be at least 1"):
        conversation.drop(count)
    assert snapshot(conversation) == state


def test_recurrent_layers_go_back_to_where_turns_and_answers_begin(begin, monkeypatch):
    conversation = begin("qwen3_next")
    for text in (words(5, 17), words(40), words(61)):
        say(conversation, text)
    places = conversation.cached.places()
    for turn in conversation.turns:
        assert {turn.start, turn.answer_start - 1} <= set(places)
    notices = []
    conversation.on_notice = notices.append
    kept = conversation.tokens[:-3]
    conversation.drop(3)
    place = conversation.turns[-1].answer_start - 1
    assert conversation.tokens == kept
    assert conversation.history.held == place
    (notice,) = notices
    assert notice == (
        f"the cache can go back to {place} only; the next turn reads {len(kept) - place} tokens "
        "again"
    )
    steps = fed(conversation, monkeypatch)
    say(conversation, words(12))
    assert sum(steps) == len(conversation.tokens) - place
    monkeypatch.undo()
    check_answer(conversation)
    check_cache(conversation)
    # The number of tokens since a turn's start is as good as /undo.
    conversation.drop(len(conversation.tokens) - conversation.turns[1].start)
    assert len(conversation.turns) == 1
    check_cache(conversation)
    say(conversation, words(8))
    check_answer(conversation)
    conversation.drop(10_000)
    check_cache(conversation)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_what_is_kept_of_old_turns_is_let_go(begin, monkeypatch, family):
    monkeypatch.setattr("mlx_kvcache.chat.token_cache.MAX_KEPT", 4)
    conversation = begin(family, spare=4)
    for number in range(5):
        say(conversation, words(10 + number))
        assert len(conversation.cached.checkpoints.positions) <= 4
        assert len(conversation.cached.states) <= 4 + 1 + 2
    conversation.undo()
    conversation.undo()
    check_cache(conversation)
    start = conversation.turns[-1].start
    notices = []
    conversation.on_notice = notices.append
    conversation.undo()
    assert f"the next turn reads {start} tokens again" in notices[0]
    say(conversation, words(8))
    check_answer(conversation)
    check_cache(conversation)


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
