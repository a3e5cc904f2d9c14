"""Models that mix attention with recurrent layers of several kinds: undo, forks and interrupts."""

from __future__ import annotations

import pytest

from tests.support.cold_runs import check_answer, check_cache, say
from tests.support.tiny_models_on_disk import words

FAMILIES = ("jamba", "falcon_h1", "lfm2", "granitemoehybrid", "nemotron_h", "plamo2", "kimi_linear")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_fork_and_interrupt(begin, family):
    conversation = begin(family, None, spare=16, prefill_step=7)
    assert conversation.cached.states
    say(conversation, words(*range(20, 40)))
    first = say(conversation, words(5))
    conversation.undo()
    check_cache(conversation)
    twin = conversation.fork()
    assert say(conversation, words(5)) == first
    check_answer(conversation)
    pieces = twin.ask(words(9))
    next(pieces)
    next(pieces)
    pieces.close()
    assert len(twin.turns[1].answer) == 2
    check_cache(twin)
    assert say(twin, words(10)) != first
    check_answer(twin)
    check_cache(twin)
    check_cache(conversation)
