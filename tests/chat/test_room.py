"""A turn is let in only where it fits, with room for an answer."""

from __future__ import annotations

import pytest

from mlx_kvcache.errors import CapacityError
from tests.support.cold_runs import check_answer, check_cache, greedy, say
from tests.support.tiny_models_on_disk import words

#: What the template and one word need in the first turn, and in each later one after a cut answer.
FIRST, LATER = 7, 7


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_turn_is_admitted_up_to_the_last_position(begin, family):
    conversation = begin(family, capacity=FIRST + 1)
    answer = say(conversation, words(5))
    assert len(answer) == 1
    assert conversation.turns[0].end == "capacity"
    assert conversation.cached.sequence.length == conversation.capacity
    check_cache(conversation)
    check_answer(conversation)


def test_a_turn_that_leaves_no_room_for_an_answer_is_refused(begin):
    conversation = begin(capacity=FIRST)
    with pytest.raises(
        CapacityError, match="needs 7 more positions and 1 for an answer, 8 with the 0 before"
    ):
        conversation.ask(words(5))
    assert (conversation.tokens, conversation.turns) == ([], ())
    # One word less fits no template, but one conversation without it.
    raw = begin(template=None, capacity=3)
    assert len(say(raw, words(5))) == 1


def test_a_refused_turn_says_the_numbers_and_changes_nothing(begin):
    conversation = begin(capacity=FIRST + 6 + LATER, capacity_source=" (--capacity)")
    say(conversation, words(5))
    tokens, turns = list(conversation.tokens), conversation.turns
    with pytest.raises(CapacityError) as refusal:
        conversation.ask(words(6))
    message = str(refusal.value)
    assert "needs 7 more positions and 1 for an answer, 21 with the 13 before" in message
    assert "the capacity is 20 (--capacity); take turns back" in message
    assert (conversation.tokens, conversation.turns) == (tokens, turns)
    check_cache(conversation)
    assert not conversation.cached.sequence.can_extend(LATER + 1)
    assert conversation.cached.sequence.can_extend(LATER)
    conversation.undo()
    say(conversation, words(6))
    check_answer(conversation)


@pytest.mark.parametrize("room", [1, 2, 5, 6, 7])
def test_the_budget_is_the_smaller_of_max_tokens_and_the_room(begin, room):
    conversation = begin(capacity=FIRST + room)
    answer = say(conversation, words(5))
    assert len(answer) == min(6, room)
    assert conversation.turns[0].end == ("length" if room >= 6 else "capacity")
    model = conversation.cached.model
    assert list(answer) == greedy(model, conversation.tokens[:FIRST], 6)[:room]
    check_cache(conversation)


def test_a_full_cache_goes_on_after_an_undo(begin):
    conversation = begin(capacity=20, max_tokens=50)
    first = say(conversation, words(5))
    assert conversation.turns[0].end == "capacity"
    with pytest.raises(CapacityError):
        conversation.ask(words(6))
    conversation.drop(9)
    assert len(conversation.turns[0].answer) == len(first) - 9
    say(conversation, words(6))
    check_answer(conversation)
    check_cache(conversation)
