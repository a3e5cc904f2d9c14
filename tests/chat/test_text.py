"""What is said, as tokens: BOS comes once, templates take arguments, answers may have begun."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import processors

from mlx_kvcache.chat.text import answer_message, chat_script, opening_tokens, stop_tokens
from mlx_kvcache.errors import ConfigError
from tests.support.tiny_tokenizers import KINDS, byte_level

#: Reasoning is asked for unless it is turned off; then it is written as done.
THINKING = (
    "{{ bos_token if bos is not defined }}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def with_template(tokenizer, template=THINKING, opening="<s>", ending=""):
    """`opening` and `ending`: the special tokens that the tokenizer puts around a text."""
    if opening or ending:
        names = [*opening.split(), *ending.split()]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{opening} $A {ending}".strip(),
            special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
        )
    tokenizer.chat_template = template
    return TokenizerWrapper(tokenizer)


THINK = {"enable_thinking": True}
WITHOUT_BOS = THINKING.replace("{{ bos_token if bos is not defined }}", "")


@pytest.mark.parametrize("template", [THINKING, WITHOUT_BOS, None], ids=["with", "without", "raw"])
@pytest.mark.parametrize("opening", ["", "<s>"])
@pytest.mark.parametrize("ending", ["", "</s>"])
@pytest.mark.parametrize("text", ["Paris", "<s>Paris"])
def test_bos_comes_once_where_the_tokenizer_or_the_template_puts_it(
    template, opening, ending, text
):
    tokenizer = with_template(byte_level(), template, opening, ending)
    script = chat_script(tokenizer, None, template is None, template and THINK)
    tokens = script.write([], [], text)
    written = tokenizer.decode(tokens)
    # A text that begins with BOS has its own; inside a template it is only part of the text.
    leads = bool(opening) or template == THINKING or (template is None and text != "Paris")
    assert written.startswith("<s>") == leads
    assert not written.startswith("<s><s>")
    body = written.removeprefix("<s>")
    assert body == ("Paris" if template is None else f"[user]{text}</s>[assistant]")
    again = script.write([(text, " the")], [*tokens, *script_answer(tokenizer)], "Paris")
    assert again[: len(tokens)] == tokens
    assert again.count(tokenizer.bos_token_id) == tokens.count(tokenizer.bos_token_id)


def script_answer(tokenizer):
    return [tokenizer.convert_tokens_to_ids("\u0120the")]


def test_the_conversation_goes_on_behind_a_bos_that_the_template_does_not_write():
    tokenizer = with_template(byte_level(), WITHOUT_BOS)
    script = chat_script(tokenizer, None, False, THINK)
    first = script.write([], [], "Paris")
    # The answer in tokens that encoding it again does not give.
    answer = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    chosen = [*first, *answer]
    again = script.write([("Paris", "the")], chosen, "Paris")
    assert again[: len(chosen)] == chosen
    rest = tokenizer.decode(again[len(chosen) :])
    assert rest == "</s>[user]Paris</s>[assistant]"
    other = script.write([("Paris", "is")], chosen, "Paris")
    assert other[: len(first)] == first
    assert other[: len(chosen)] != chosen


@pytest.mark.parametrize("kind", KINDS)
def test_opening_tokens_are_what_encoding_puts_in_front(kind):
    tokenizer = KINDS[kind]()
    full = tokenizer.encode("", add_special_tokens=True)
    assert opening_tokens(tokenizer) == full == ([1] if "sentencepiece" in kind else [])


def test_a_template_takes_arguments():
    tokenizer = with_template(byte_level())
    plain = chat_script(tokenizer, None, False).write([], [], "Paris")
    off = chat_script(tokenizer, None, False, {"enable_thinking": False}).write([], [], "Paris")
    on = chat_script(tokenizer, None, False, THINK).write([], [], "Paris")
    done = tokenizer.encode("<think></think>", add_special_tokens=False)
    assert off == [*on, *done]
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Paris"}], add_generation_prompt=True
    )
    assert plain == expected
    unread = chat_script(tokenizer, None, False, {"nothing_reads_this": 1})
    assert unread.write([], [], "Paris") == plain
    # The system prompt and the end of an answer are rendered with the arguments too.
    fussy = "{{ raise_exception('no style') if style is not defined }}" + THINKING
    tokenizer = with_template(byte_level(), fussy)
    with pytest.raises(ConfigError, match="no style"):
        chat_script(tokenizer, "the", False)
    styled = chat_script(tokenizer, "the", False, {"style": 1})
    assert "[system]the</s>" in tokenizer.decode(styled.write([], [], "Paris"))
    tokenizer.eos_token_ids = [0]
    end = tokenizer.convert_tokens_to_ids("</s>")
    assert end in stop_tokens(tokenizer, {"style": 1})
    assert end not in stop_tokens(tokenizer)


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "messages", "return_dict"])
def test_arguments_that_are_not_the_callers_are_refused(name):
    tokenizer = with_template(byte_level())
    with pytest.raises(ConfigError, match=f"{name}.*is not an argument to give"):
        chat_script(tokenizer, None, False, {name: False})


def test_arguments_without_a_template_are_refused():
    arguments = {"enable_thinking": False}
    with pytest.raises(ConfigError, match="'enable_thinking' to: --raw leaves"):
        chat_script(with_template(byte_level()), None, True, arguments)
    with pytest.raises(ConfigError, match="'enable_thinking' to: the model has no chat template"):
        chat_script(TokenizerWrapper(byte_level()), None, False, arguments)
    with pytest.raises(ConfigError, match="arguments by name, got 'not a name'"):
        chat_script(with_template(byte_level()), None, False, {"not a name": 1})
    assert chat_script(TokenizerWrapper(byte_level()), None, False, {}).write([], [], "the")


def test_an_answer_that_has_begun_is_what_mlx_lm_renders():
    tokenizer = with_template(byte_level())
    script = chat_script(tokenizer, None, False, THINK)
    base = script.write([], [], "Paris")
    begun = script.write([], [], "Paris", " the\u20ac")
    assert begun[: len(base)] == base
    assert tokenizer.decode(begun[len(base) :]) == " the\u20ac"
    messages = [
        {"role": "user", "content": "Paris"},
        {"role": "assistant", "content": " the\u20ac"},
    ]
    assert begun == tokenizer.apply_chat_template(
        messages, continue_final_message=True, add_generation_prompt=False, enable_thinking=True
    )
    assert script.write([], [], "Paris", "") == base


def test_what_begins_an_answer_follows_all_that_the_template_puts_before_it():
    tokenizer = with_template(byte_level())
    script = chat_script(tokenizer, None, False, {"enable_thinking": False})
    written = tokenizer.decode(script.write([("is", "the")], [], "Paris", "the"))
    assert written.endswith("[assistant]<think></think>the")


def test_what_begins_an_answer_never_changes_the_tokens_before_it():
    """A token that reaches across the seam would."""
    tokenizer = with_template(byte_level(), THINKING + "\n")
    script = chat_script(tokenizer, None, False, THINK)
    base = script.write([], [], "Paris")
    for prefill in ("\nthe", " the", "\u20ac"):
        begun = script.write([], [], "Paris", prefill)
        assert begun[: len(base)] == base
        assert tokenizer.decode(begun[len(base) :]) == prefill


def test_raw_text_and_the_beginning_of_its_answer_are_read_as_one():
    byte = TokenizerWrapper(byte_level())
    script = chat_script(byte, None, True)
    assert byte.decode(script.write([], [], "Paris", " the")) == "Paris the"
    before = script.write([], [], "Paris")
    assert script.write([], [], "Paris", " the")[: len(before)] == before
    later = script.write([], [7, 8], "Paris", " the")
    assert later == [7, 8, *byte.encode("Paris the", add_special_tokens=False)]


CHANNELS = (
    "{% for message in messages %}"
    "{% if '<|channel|>' in message.content %}{{ raise_exception('channels') }}{% endif %}"
    "[{{ message.role }}]{% if message.thinking and loop.last %}({{ message.thinking }})"
    "{% endif %}{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>two\nlines<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Paris < Rome"


def test_answers_in_channels_are_given_to_the_template_as_it_wants_them():
    assert answer_message("Paris") == {"role": "assistant", "content": "Paris"}
    whole = {"role": "assistant", "content": "Paris < Rome", "thinking": "two\nlines"}
    assert answer_message(THOUGHT + FINAL) == whole
    assert answer_message(THOUGHT[:-7]) == {**whole, "content": ""}
    commentary = "<|channel|>commentary to=tool <|constrain|>json<|message|>{}<|call|>"
    assert answer_message(THOUGHT + commentary)["content"] == "{}"
    tokenizer = with_template(byte_level(), CHANNELS)
    script = chat_script(tokenizer, None, False)
    first = script.write([], [], "is")
    said = [*first, *tokenizer.encode(THOUGHT + FINAL, add_special_tokens=False)]
    second = script.write([("is", THOUGHT + FINAL)], said, "the")
    assert second[: len(first)] == first
    written = tokenizer.decode(second[len(first) :])
    assert written == "Paris < Rome</s>[user]the</s>[assistant]"
    assert script.stays([], "is", first) == len(first)
