"""Templates that leave out earlier reasoning: each turn reads what is new, and nothing else."""

from __future__ import annotations

import pytest

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.cache import sequence
from mlx_kvcache.chat import checkpoints, token_cache
from mlx_kvcache.chat.conversation import Conversation
from mlx_kvcache.chat.turns import ChatOptions
from tests.support.cold_runs import check_answer, check_cache, fed, greedy, say
from tests.support.interrupts import Interrupter
from tests.support.tiny_models_on_disk import TEMPLATE, words

#: `w90` opens a thought and `w91` closes it; earlier answers are written without. The thought is
#: opened for the model, which history does not show either.
STRIPPING = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content.split('w91 ') | last if message.role == 'assistant' "
    "else message.content }}",
).replace("w94 w93{% endif %}", "w94 w93 w90{% endif %}")
LONG = words(*range(20, 60))
TEXTS = (LONG, words(5, 17), words(61), words(40, 41))


def talking(begin, family, **options):
    """A conversation whose model, after its thought of 12 tokens, closes it and says 4 more."""
    conversation = begin(family, STRIPPING, max_tokens=17, **options)
    generate = conversation.cached.generate

    def thoughtful(first, count, sampler):
        made = 0

        def closing(logprobs):
            nonlocal made
            made += 1
            token = sampler(logprobs)
            return token * 0 + 91 if made == 13 else token

        return generate(first, count, closing)

    conversation.cached.generate = thoughtful
    return conversation


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_only_what_is_new_is_read_past_the_window(begin, monkeypatch, family):
    conversation = talking(begin, family, spare=4, prefill_step=8)
    conversation.on_notice = pytest.fail
    say(conversation, TEXTS[0])
    for text in TEXTS[1:]:
        before, turn = list(conversation.tokens), conversation.turns[-1]
        assert turn.answer[12] == 91
        place = turn.answer_start - 1
        if family != "qwen3_next":
            sequence = conversation.cached.sequence
            assert sequence.length > sequence.rewind_floor > place, "the rings have not wrapped"
        with monkeypatch.context() as patch:
            steps = fed(conversation, patch)
            say(conversation, text)
        newest = conversation.turns[-1]
        # The thought is gone from the turn before, and the rest of its answer is read anew.
        assert conversation.tokens[:place] == before[:place]
        rest = list(turn.answer[13:])
        ask = [95, 94, 92, *(int(word[1:]) for word in text.split()), 95, 94, 93, 90]
        assert conversation.tokens[place : newest.answer_start] == [*rest, *ask]
        assert sum(steps) == len(rest) + len(ask) + len(newest.answer)
        self_made = greedy(
            conversation.cached.model, conversation.tokens[: newest.answer_start], 12
        )
        assert list(newest.answer[:12]) == self_made
        check_cache(conversation)


@pytest.mark.slow
def test_without_what_is_kept_everything_is_read_again(begin, monkeypatch):
    """What the counts of the test above are worth."""
    conversation = talking(begin, "llama", spare=4)
    say(conversation, TEXTS[0])
    conversation.cached.checkpoints.keep(frozenset())
    notices = []
    conversation.on_notice = notices.append
    steps = fed(conversation, monkeypatch)
    say(conversation, TEXTS[1])
    assert sum(steps) == len(conversation.tokens)
    assert "can go back to 0 only" in notices[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_undo_and_retry_and_forks_of_rewritten_turns(begin, family):
    conversation = talking(begin, family, spare=4)
    for text in TEXTS[:3]:
        say(conversation, text)
    tokens, turns = list(conversation.tokens), conversation.turns
    twin = conversation.fork()
    conversation.undo()
    check_cache(conversation)
    assert say(conversation, TEXTS[2]) == turns[2].answer
    assert conversation.tokens == tokens
    check_cache(conversation)
    for _ in conversation.retry():
        pass
    assert conversation.tokens == tokens
    check_cache(conversation)
    twin.undo()
    twin.undo()
    check_cache(twin)
    assert len(twin.tokens) == turns[1].start
    check_cache(conversation)


def test_what_is_kept_stays_within_its_bounds(loaded, monkeypatch):
    model, tokenizer = loaded("llama")
    monkeypatch.setattr("mlx_kvcache.chat.token_cache.KEPT_BYTES", 0)
    cache = make_prompt_cache(model, spare=4, initial_capacity=4)
    conversation = Conversation(model, tokenizer, cache, ChatOptions(max_tokens=12))
    cached, sequence = conversation.cached, conversation.cached.sequence
    for number in range(8):
        say(conversation, words(10 + number, 50, 51, 52, 53))
        place = cached.checkpoints.place_nbytes
        assert 0 < place < sequence.nbytes
        assert cached.checkpoints.nbytes <= max(sequence.nbytes, 2 * place)
        assert len(cached.checkpoints.positions) >= (2 if number else 1)
    assert len(cached.checkpoints.positions) < 16
    check_answer(conversation)
    check_cache(conversation)


def test_a_model_without_rings_keeps_no_rows(begin):
    conversation = begin("qwen3")
    say(conversation, words(5))
    say(conversation, words(6))
    assert not conversation.cached.keeps_places
    assert conversation.cached.checkpoints.positions == ()
    assert conversation.cached.checkpoints.nbytes == 0
    conversation.undo()
    conversation.undo()
    check_cache(conversation)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_going_back_can_be_interrupted_at_any_line(begin, family):
    """An undo past the window, and the turn after it, whatever line Ctrl-C hits."""
    files = [checkpoints.__file__, token_cache.__file__, sequence.__file__]
    start = begin(family, spare=2, max_tokens=3)
    for text in (words(*range(20, 40)), words(5, 17), words(61)):
        say(start, text)
    place = start.turns[-1].start
    start.drop(1)
    whole, first = start.fork(), Interrupter(files)
    first.call(whole.undo)
    check_cache(whole)
    answer = say(whole, words(61))
    visited = list(first.lines)
    opens = checkpoints.RingCheckpoints.go_back.__code__.co_firstlineno
    gone_back = {(checkpoints.__file__, line) for line in range(opens, opens + 5)} & set(visited)
    assert bool(gone_back) == (family == "llama")
    # Each line once, where it is run for the first time.
    for number in sorted({line: at for at, line in reversed(list(enumerate(visited)))}.values()):
        twin = start.fork()
        with pytest.raises(KeyboardInterrupt):
            Interrupter(files, number).call(twin.undo)
        # At once, since a traced exception may be kept alive by Python, and its frames with it.
        try:
            if len(twin.turns) == 3:
                twin.undo()
            assert twin.tokens == start.tokens[:place]
            assert say(twin, words(61)) == answer
            if number % 4 == 0:
                check_cache(twin)
        finally:
            twin.close()
    whole.close()
    start.close()
