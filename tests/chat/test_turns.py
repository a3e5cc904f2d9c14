"""Turns over one cache: what is fed, what is kept, and how the template goes on."""

from __future__ import annotations

from itertools import zip_longest

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.chat.conversation import ChatOptions, Conversation, spans
from mlx_kvcache.chat.text import TemplateScript, stop_tokens
from mlx_kvcache.control.registry import REGISTRY
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.integrations.sampling import Sampling
from tests.support.cold_runs import check_answer, check_cache, greedy, say
from tests.support.tiny_models_on_disk import FORGETFUL, TEMPLATE, words

FAMILIES = ("llama", "gemma3_text", "qwen3_next")
TURNS = (words(5, 17), words(40, 33, 8), words(61), words(22, 30, 77))


def fed(conversation, monkeypatch):
    """Count the tokens that the model is run over, by wrapping the conversation's model."""
    counted = []
    model = conversation.cached.model

    class Counting:
        def __call__(self, tokens, cache):
            counted.extend([tokens] if tokens.ndim == 2 else [])
            return model(tokens, cache=cache)

    monkeypatch.setattr(conversation.cached, "model", Counting())
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "raw"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_answers_as_a_cold_run_over_all_tokens(begin, family, template):
    conversation = begin(family, template)
    for number, text in enumerate(TURNS, 1):
        before = list(conversation.tokens)
        say(conversation, text)
        assert conversation.tokens[: len(before)] == before
        assert len(conversation.turns) == number
        check_answer(conversation)
        check_cache(conversation)


def test_the_template_continues_exactly_and_bos_comes_once(begin):
    conversation = begin()
    first = say(conversation, words(5, 17))
    assert conversation.tokens == [1, 94, 92, 5, 17, 95, 94, 93, *first]
    second = say(conversation, words(40))
    # The answer was cut, so the template itself closes it.
    assert conversation.turns[0].end == "length"
    ask = [95, 94, 92, 40, 95, 94, 93]
    assert conversation.tokens == [1, 94, 92, 5, 17, 95, 94, 93, *first, *ask, *second]
    assert first != second


def test_raw_turns_follow_each_other_and_bos_comes_once(begin):
    conversation = begin(template=None)
    first = say(conversation, words(5, 17))
    second = say(conversation, words(40))
    assert conversation.tokens == [1, 5, 17, *first, 40, *second]
    conversation.reset()
    say(conversation, words(6))
    assert conversation.tokens[:2] == [1, 6]


def test_raw_leaves_a_template_out(begin):
    conversation = begin(raw=True)
    say(conversation, words(5, 17))
    assert conversation.tokens[:3] == [1, 5, 17]
    say_bos = begin(raw=True)
    say(say_bos, "<s> " + words(5, 17))
    assert say_bos.tokens == conversation.tokens


def test_only_the_new_tokens_are_fed(begin, monkeypatch):
    conversation = begin(prefill_step=4)
    say(conversation, words(*range(10, 40)))
    length = len(conversation.tokens)
    steps = fed(conversation, monkeypatch)
    say(conversation, words(5, 6, 7))
    sizes = [step.shape[1] for step in steps]
    assert sum(sizes) == len(conversation.tokens) - length
    # Prefill in pieces of 4, the last prompt token alone, and one step for each answer token.
    assert sizes == [4, 4, 1, *[1] * 6]
    joined = [int(token) for step in steps for token in step[0]]
    assert joined == conversation.tokens[length:]


def test_the_token_that_ends_an_answer_is_kept_and_not_said(loaded):
    model, tokenizer = loaded("llama", TEMPLATE)
    prompt = [1, 94, 92, 5, 17, 95, 94, 93]
    natural = greedy(model, prompt, 12)
    end = next(token for token in natural[3:] if token not in natural[:3])
    ended = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[end])
    conversation = Conversation(model, ended, make_prompt_cache(model), ChatOptions(max_tokens=12))
    pieces = "".join(conversation.ask(words(5, 17)))
    turn = conversation.turns[0]
    assert turn.end == "stop"
    assert list(turn.answer) == natural[: natural.index(end) + 1]
    assert conversation.tokens == [*prompt, *turn.answer]
    said = [f"w{token}" for token in turn.answer[:-1]]
    assert pieces.split() == said
    assert conversation.answer_text(turn).split() == said
    check_cache(conversation)
    # In a conversation without this end the answer goes on.
    open_end = Conversation(model, tokenizer, make_prompt_cache(model), ChatOptions(max_tokens=12))
    assert list(say(open_end, words(5, 17))) == natural


def test_the_turn_end_of_the_template_ends_an_answer_though_the_config_leaves_it_out():
    class Fake:
        eos_token_ids = (2,)
        all_special_ids = (2, 50)

        def apply_chat_template(self, messages, add_generation_prompt, **_):
            text = "".join(f"[{each['role']}]{each['content']}<end>" for each in messages)
            return text + ("[assistant]" if add_generation_prompt else "")

        def encode(self, text, **_):
            return [50] if text.startswith("<end>") else [ord(each) for each in text]

    fake = Fake()
    assert TemplateScript(fake, None).stop_tokens == stop_tokens(fake) == {2, 50}
    fake.all_special_ids = (2,)
    assert TemplateScript(fake, None).stop_tokens == stop_tokens(fake) == {2}


def letters():
    """A tokenizer that knows a, b, ab and a template: "ab" can be written in two ways."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<end>": 3, "<user>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=["<user>"]
    )
    wrapped.chat_template = (
        "{% for message in messages %}{% if message.role == 'user' %}<user>{% endif %}"
        "{{ message.content }}<end>{% endfor %}"
    )
    return TokenizerWrapper(wrapped)


def test_an_answer_keeps_the_tokens_that_the_model_chose():
    script = TemplateScript(letters(), None)
    first = script.write([], [], "b")
    assert first == [4, 1, 3]
    chosen = [*first, 0, 1, 3]
    again = script.write([("b", "ab")], chosen, "a")
    assert again == [*chosen, 4, 0, 3]
    # The same text in the tokenizer's own words, and another text.
    assert script.write([("b", "ab")], [*first, 2, 3], "a") == [*first, 2, 3, 4, 0, 3]
    assert script.write([("b", "bb")], chosen, "a") == [*first, 1, 1, 3, 4, 0, 3]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_rewrites_history_is_followed(begin, family):
    conversation = begin(family, FORGETFUL)
    notices = []
    conversation.on_notice = notices.append
    first = say(conversation, words(5, 17))
    start = conversation.turns[0].answer_start
    second = say(conversation, words(40))
    assert first[0] != first[1]
    rewritten = [1, 94, 92, 5, 17, 95, 94, 93, *first[1:], 95, 94, 92, 40, 95, 94, 93]
    assert conversation.tokens == [*rewritten, *second]
    assert conversation.turns[1].start == start
    assert conversation.turns[0].answer == first
    check_answer(conversation)
    check_cache(conversation)
    assert notices == []
    third = say(conversation, words(8))
    assert conversation.tokens[-len(third) :] == list(third)
    check_answer(conversation)
    check_cache(conversation)
    conversation.undo()
    check_cache(conversation)
    assert say(conversation, words(8)) == third


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_changes_the_very_beginning_is_followed(begin, family):
    """As templates with today's date do: nothing of the cache but BOS can be kept."""
    dated = "{{ bos_token }} w{{ 11 if messages|length > 4 else 10 }} "
    dated = TEMPLATE.replace("{{ bos_token }} ", dated)
    conversation = begin(family, dated, prefill_step=4)
    for date, text in zip((10, 10, 11), (words(5, 17), words(40), words(61)), strict=True):
        say(conversation, text)
        assert conversation.tokens[:2] == [1, date]
        check_answer(conversation)
        check_cache(conversation)
    last = conversation.undo()
    for turn in conversation.turns:
        assert turn.start <= len(conversation.tokens)
    check_cache(conversation)
    assert [turn.user for turn in conversation.turns] == [words(5, 17), words(40)]
    assert say(conversation, words(61)) == last.answer
    check_cache(conversation)


def test_history_rewritten_beyond_all_that_is_kept_is_read_again(begin, monkeypatch):
    conversation = begin("llama", FORGETFUL, spare=2, max_tokens=12)
    notices = []
    conversation.on_notice = notices.append
    say(conversation, words(5, 17))
    assert conversation.cached.sequence.rewind_floor > conversation.turns[0].answer_start
    conversation.cached.checkpoints.keep(frozenset())
    steps = fed(conversation, monkeypatch)
    say(conversation, words(40))
    assert len(notices) == 1
    assert "can go back to 0 only" in notices[0]
    assert sum(step.shape[1] for step in steps) == len(conversation.tokens)
    monkeypatch.undo()
    check_answer(conversation)
    check_cache(conversation)


def test_the_system_prompt_stands_first(begin):
    conversation = begin(system=words(60, 61))
    with_system = say(conversation, words(5))
    assert conversation.tokens[:8] == [1, 94, 91, 60, 61, 95, 94, 92]
    check_answer(conversation)
    assert with_system != say(begin(), words(5))
    conversation.reset()
    assert say(conversation, words(5)) == with_system


def test_refused_texts_change_nothing(begin):
    conversation = begin()
    say(conversation, words(5, 17))
    state = (list(conversation.tokens), conversation.turns)
    with pytest.raises(ConfigError, match="chat template refuses this: not that; use --raw"):
        conversation.ask("w9")
    assert (conversation.tokens, conversation.turns) == state
    check_cache(conversation)
    raw = begin(template=None)
    say(raw, words(5))
    with pytest.raises(ConfigError, match="no token of this model"):
        raw.ask("")
    check_cache(raw)
    say(raw, words(6))
    check_answer(raw)


def test_system_prompts_that_cannot_be(begin):
    with pytest.raises(ConfigError, match="refuses this: not that; leave --system out"):
        begin(system="w9")
    with pytest.raises(ConfigError, match="no chat template to put a system prompt into"):
        begin(template=None, system="w5")
    with pytest.raises(ConfigError, match="no chat template to put a system prompt into"):
        begin(raw=True, system="w5")


def test_the_iterator_may_be_left_alone(begin):
    conversation = begin()
    never_read = conversation.ask(words(5))
    assert conversation.turns == ()
    half_read = conversation.ask(words(6))
    next(half_read)
    next(half_read)
    say(conversation, words(7))
    assert [turn.end for turn in conversation.turns] == ["interrupted", "length"]
    assert len(conversation.turns[0].answer) == 2
    assert list(never_read) == list(half_read) == []
    check_answer(conversation)
    check_cache(conversation)


def test_sampling_follows_the_seed(begin):
    answers = []
    for seed in (1, 1, 2):
        conversation = begin(sampling=Sampling(1.5, 0.95, seed), max_tokens=20)
        answers.append(say(conversation, words(5)))
        check_cache(conversation)
    assert answers[0] == answers[1] != answers[2]


def test_answers_that_run_in_turns_draw_what_each_would_alone(begin):
    samplings = (Sampling(1.5, seed=1), Sampling(1.5, seed=2))

    def answers(conversations):
        return [[turn.answer for turn in each.turns] for each in conversations]

    alone = [begin(sampling=sampling, max_tokens=12) for sampling in samplings]
    for conversation in alone:
        say(conversation, words(5))
        say(conversation, words(6))
    mx.random.seed(3)
    both = [begin(sampling=sampling, max_tokens=12) for sampling in samplings]
    running = [conversation.ask(words(5)) for conversation in both]
    for _ in zip_longest(*running):
        pass
    for conversation in both:
        say(conversation, words(6))
    assert answers(both) == answers(alone)
    assert answers(both)[0] != answers(both)[1]
    left = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    assert mx.random.uniform(shape=(4,)).tolist() == left


def test_a_stop_text_ends_an_answer_and_is_no_part_of_the_conversation(begin):
    plain = begin(max_tokens=12)
    say(plain, words(5))
    (turn,) = plain.turns
    text = plain.answer_text(turn)
    # From the middle of one word into the next.
    said = text.split()
    stop = f"{said[3][-1]} {said[4][:-1]}"
    conversation = begin(max_tokens=12, stop_texts=("nowhere", stop))
    shown = "".join(conversation.ask(words(5)))
    assert shown == text[: text.index(stop)]
    (cut,) = conversation.turns
    assert (cut.end, conversation.answer_text(cut)) == ("stop", shown)
    assert cut.answer == turn.answer[: len(cut.answer)]
    assert 4 <= len(cut.answer) <= 5
    say(conversation, words(6))
    check_cache(conversation)
    other = begin(max_tokens=12, stop_texts=("nowhere",))
    assert "".join(other.ask(words(5))) == text


def test_penalties_look_at_the_whole_conversation(begin):
    """The second answer is what all tokens before it make of it, not only its own turn's."""
    heavy = Sampling(presence_penalty=6.0, presence_context_size=0)
    conversation = begin(sampling=heavy, max_tokens=12)
    say(conversation, words(5))
    say(conversation, words(6))
    for turn in conversation.turns:
        said = [*conversation.tokens[: turn.answer_start]]
        for token in turn.answer:
            logits = conversation.cached.model(mx.array([said]))[0, -1]
            logits[mx.array(said)] -= 6.0
            assert token == int(mx.argmax(logits).item())
            said.append(token)
    plain = begin(max_tokens=12)
    say(plain, words(5))
    assert plain.turns[0].answer != conversation.turns[0].answer


def test_a_conversation_is_in_the_registry_until_it_is_closed(begin):
    known = REGISTRY.keys()
    conversation = begin()
    (key,) = set(REGISTRY.keys()) - set(known)
    assert REGISTRY.get(key) is conversation.cached.sequence
    twin = conversation.fork()
    assert len(REGISTRY.keys()) == len(known) + 2
    conversation.close()
    conversation.close()
    assert key not in set(REGISTRY.keys())
    say(twin, words(5))
    check_cache(twin)
    twin.close()
    assert REGISTRY.keys() == known


def test_spans():
    assert list(spans(0, 10, 4, [])) == [(0, 4), (4, 8), (8, 10)]
    assert list(spans(3, 10, 4, [0, 3, 5, 10, 12])) == [(3, 5), (5, 9), (9, 10)]
    assert list(spans(5, 5, 4, [2])) == list(spans(6, 5, 4, [])) == []


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "raw"])
def test_answers_that_are_made_to_begin_with_a_text(begin, template):
    conversation = begin(template=template, prefill=words(30, 31), max_tokens=4)
    shown = "".join(conversation.ask(words(5, 17)))
    (turn,) = conversation.turns
    assert turn.answer[:2] == (30, 31)
    assert (len(turn.answer), turn.end) == (6, "length")
    asked = [1, 94, 92, 5, 17, 95, 94, 93] if template else [1, 5, 17]
    assert conversation.tokens == [*asked, *turn.answer]
    assert shown == conversation.answer_text(turn)
    assert shown == conversation.tokenizer.decode(list(turn.answer))
    assert shown.startswith(words(30, 31) + " ")
    model = conversation.cached.model
    assert list(turn.answer[2:]) == greedy(model, [*asked, 30, 31], 4)
    assert list(turn.answer[2:]) != greedy(model, asked, 4)
    check_cache(conversation)
    before = list(conversation.tokens)
    say(conversation, words(40))
    assert conversation.tokens[: len(before)] == before
    assert conversation.turns[1].answer[:2] == (30, 31)
    assert "".join(conversation.retry()).startswith(words(30, 31))
    assert conversation.tokens[: len(before)] == before
    check_cache(conversation)
    conversation.undo()
    assert conversation.tokens == before


def test_the_template_takes_the_arguments_of_the_conversation(begin):
    styled = TEMPLATE.replace("{{ bos_token }} ", "{{ bos_token }} w{{ style or 10 }} ")
    conversation = begin(template=styled, template_args={"style": 12})
    say(conversation, words(5))
    assert conversation.tokens[:3] == [1, 12, 94]
    check_answer(conversation)
    plain = begin(template=styled)
    say(plain, words(5))
    assert plain.tokens[:3] == [1, 10, 94]
    with pytest.raises(ConfigError, match="--raw leaves the chat template out"):
        begin(raw=True, template_args={"style": 12})


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_retry_that_is_broken_off_keeps_the_answer(begin, family):
    conversation = begin(family, spare=2)
    say(conversation, words(*range(20, 40)))
    say(conversation, words(5))
    tokens, turns = list(conversation.tokens), conversation.turns
    pieces = conversation.retry()
    conversation.stop()
    assert list(pieces) == []
    assert (conversation.tokens, conversation.turns) == (tokens, turns)
    pieces = conversation.retry()
    next(pieces)
    pieces.close()
    assert conversation.turns[:1] == turns[:1]
    assert conversation.turns[1].answer == turns[1].answer[:1]
    say(conversation, words(6))
    check_answer(conversation)
    check_cache(conversation)


def test_a_retry_draws_another_answer(begin):
    mx.random.seed(5)
    conversation = begin(sampling=Sampling(1.5), max_tokens=20)
    say(conversation, words(5))
    first = say(conversation, words(6))
    before = conversation.tokens[: conversation.turns[1].answer_start]
    for _ in conversation.retry():
        pass
    assert len(conversation.turns) == 2
    assert conversation.turns[1].answer != first
    assert conversation.tokens == [*before, *conversation.turns[1].answer]
    check_cache(conversation)
