"""The pieces of an answer add up to its tokens' text, whatever the tokenizer and the tokens."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from typer.testing import CliRunner

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.chat import streaming
from mlx_kvcache.chat.conversation import ChatOptions, Conversation
from mlx_kvcache.chat.generation import Generation
from mlx_kvcache.chat.streaming import AnswerText, answer_text
from mlx_kvcache.commands.app import app
from mlx_kvcache.integrations.sampling import Sampling
from mlx_kvcache.models import load, resolve
from tests.support.tiny_tokenizers import KINDS


@functools.cache
def tokenizer_of(kind):
    return TokenizerWrapper(KINDS[kind]())


def pieces_of(tokenizer, tokens, stop=(), text_class=AnswerText):
    text = text_class(tokenizer, stop)
    return [*(text.add(token) for token in tokens), text.finish()]


def check(tokenizer, tokens, text_class=AnswerText):
    pieces = pieces_of(tokenizer, tokens, text_class=text_class)
    assert "".join(pieces) == tokenizer.decode(tokens)


KIND = pytest.mark.parametrize("kind", KINDS)


@st.composite
def token_lists(draw, kind):
    """Random tokens, ids beyond the vocabulary, and texts that are cut anywhere."""
    tokenizer = tokenizer_of(kind)
    count = len(tokenizer)
    tokens = draw(st.lists(st.integers(0, count + 3), max_size=40))
    byte_names = [f"<0x{byte:02X}>" for byte in draw(st.text(max_size=5)).encode()]
    known = tokenizer.get_vocab()
    text = [known[name] for name in byte_names if name in known]
    if kind == "byte_level":
        text = tokenizer.encode(draw(st.text(max_size=8)), add_special_tokens=False)
    place = draw(st.integers(0, len(tokens)))
    cut = draw(st.integers(0, len(text)))
    return [*tokens[:place], *text[:cut], *tokens[place:]]


@pytest.mark.slow
@KIND
@given(data=st.data())
def test_pieces_add_up_to_the_text_of_all_tokens(kind, data):
    check(tokenizer_of(kind), data.draw(token_lists(kind)))


class NothingBefore(AnswerText):
    """Decodes each word by itself."""

    def _move_on(self, text):
        super()._move_on(text)
        self._before, self._before_length = [], 0


class NothingHeld(AnswerText):
    """Shows every byte as it comes."""

    def add(self, token):
        self._held.append(token)
        return self._release(final=True)


class EarlyBytes(AnswerText):
    """Shows characters of byte tokens as soon as they are whole."""

    def _goes_on(self, _token):
        return False


@pytest.mark.parametrize(
    ("kind", "names", "wrong"),
    [
        ("sentencepiece_with_a_first_space", ["is", "\u2581Paris"], NothingBefore),
        ("metaspace", ["is", "\u2581Paris"], NothingBefore),
        ("words", ["is", "Paris"], NothingBefore),
        ("wordpiece", ["Paris", "the", "##is"], NothingBefore),
        ("byte_level", ["\u00e2", "\u0124", "\u00ac"], NothingHeld),
        ("sentencepiece", ["<0xE2>", "<0x82>", "<0xAC>"], NothingHeld),
        ("sentencepiece", ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>"], EarlyBytes),
    ],
)
def test_the_check_sees_what_is_decoded_too_early_or_by_itself(kind, names, wrong):
    tokenizer = tokenizer_of(kind)
    tokens = [tokenizer.convert_tokens_to_ids(name) for name in names]
    check(tokenizer, tokens)
    with pytest.raises(AssertionError):
        check(tokenizer, tokens, wrong)


def test_the_first_space_stays_unlike_in_mlx_lm():
    tokenizer = tokenizer_of("byte_level")
    tokens = [tokenizer.convert_tokens_to_ids("\u0120Paris")]
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens) == " Paris"
    theirs = BPEStreamingDetokenizer(tokenizer)
    theirs.add_token(tokens[0])
    theirs.finalize()
    assert theirs.text == "Paris"


def test_text_comes_as_soon_as_it_is_certain():
    tokenizer = tokenizer_of("byte_level")
    number = tokenizer.convert_tokens_to_ids
    euro = tokenizer.encode("\u20ac", add_special_tokens=False)
    assert len(euro) == 3
    tokens = [number("\u0120Paris"), *euro, number("\u0120the")]
    assert pieces_of(tokenizer, tokens) == [" Paris", "", "", "\u20ac", " the", ""]
    # A character that stays unfinished is shown as what it is decoded to.
    assert pieces_of(tokenizer, [*euro[:2], tokens[0]]) == ["", "", "\ufffd Paris", ""]
    assert pieces_of(tokenizer, euro[:2]) == ["", "", "\ufffd"]
    spm = tokenizer_of("sentencepiece")
    run = [spm.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\u20ac".encode()]
    the = spm.convert_tokens_to_ids("\u2581the")
    assert pieces_of(spm, [the, *run, the]) == [" the", "", "", "", "\u20ac the", ""]


def test_stop_tokens_are_no_text_and_other_special_tokens_are():
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        think, end = tokenizer.convert_tokens_to_ids(["<think>", "</s>"])
        tokens = [think, end]
        assert "".join(pieces_of(tokenizer, tokens, {end})) == "<think>"
        assert answer_text(tokenizer, tokens, {end}) == "<think>"
        assert "</s>" in answer_text(tokenizer, tokens)
        assert answer_text(tokenizer, [], {end}) == ""


@KIND
@pytest.mark.parametrize("filler", ["word", "broken", "byte", "unknown"])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(kind, filler, monkeypatch):
    tokenizer = tokenizer_of(kind)
    known = tokenizer.get_vocab()
    names = {"word": ("\u2581the", "\u0120the", "the"), "broken": ("\ufffd", "\u00ff", "<0xFF>")}
    names["byte"] = ("<0xFF>", "\u00ff", "\ufffd")
    chosen = [known[name] for name in names.get(filler, ()) if name in known]
    token = chosen[0] if chosen else len(tokenizer) + 3
    decoded = []

    def counted(tokenizer, tokens):
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    monkeypatch.setattr(streaming, "spell", counted)
    count = 2000
    pieces = pieces_of(tokenizer, [token] * count)
    assert "".join(pieces) == tokenizer.decode([token] * count)
    assert sum(decoded) < 12 * count


@KIND
def test_answers_are_their_tokens_text(kind, loaded):
    """A single prompt's, a conversation's, whole or broken off."""
    model, _ = loaded()
    tokenizer = tokenizer_of(kind)
    generation = Generation(
        model, tokenizer, [1, 5, 17], make_prompt_cache(model), 20, (), Sampling(2.0, seed=3)
    )
    pieces = "".join(generation.pieces())
    assert len(generation.token_ids) == 20
    assert pieces == generation.text == tokenizer.decode(generation.token_ids)
    for count in range(5):
        broken = Generation(model, tokenizer, [1, 5, 17], make_prompt_cache(model), 20, ())
        shown = broken.pieces()
        text = "".join(next(shown) for _ in range(count))
        shown.close()
        text += broken.break_off()
        assert text == broken.text == tokenizer.decode(broken.token_ids)
    options = ChatOptions(raw=True, max_tokens=20, sampling=Sampling(2.0))
    conversation = Conversation(model, tokenizer, make_prompt_cache(model), options)
    assert conversation.tokens == []
    shown = "".join(conversation.ask("the"))
    (turn,) = conversation.turns
    said = turn.answer[:-1] if turn.end == "stop" else turn.answer
    assert shown == conversation.answer_text(turn) == tokenizer.decode(list(said))


@pytest.mark.models
def test_the_first_space_of_an_answer_is_written():
    prompt = "The capital of France is"
    raw = ("--raw", "--max-tokens", "4")
    run = CliRunner().invoke
    facts = run(app, ["generate", prompt, *raw, "--json"]).stdout
    line = run(app, ["batch", *raw], input=f"{prompt}\n").stdout
    _, tokenizer = load(resolve("smollm2"))
    text = json.loads(facts)["text"]
    assert text.startswith(" Paris")
    assert text == tokenizer.decode(json.loads(facts)["token_ids"])
    assert json.loads(line)["text"] == text


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_tokenizers(name):
    tokenizer = load_tokenizer(resolve(name))

    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    def random_tokens(tokens):
        check(tokenizer, tokens)

    @given(st.text())
    def texts(text):
        check(tokenizer, tokenizer.encode(text, add_special_tokens=False))

    random_tokens()
    texts()
    # A character that no vocabulary has, so that it is written in bytes.
    rare = tokenizer.encode("\U000f1234", add_special_tokens=False)
    assert len(rare) >= 4
    check(tokenizer, rare)
    with pytest.raises(AssertionError):
        check(tokenizer, rare, NothingHeld)
