"""Ends of turns of any type are one token and end the answer; BOS comes once where it is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

import mlx_kvcache.models as models
from mlx_kvcache.chat.text import TemplateScript, stop_tokens
from mlx_kvcache.errors import ModelFormatError
from mlx_kvcache.models.gguf_file import GGUFFile, open_gguf
from mlx_kvcache.models.gguf_special import end_tokens, vocabulary
from tests.support.gguf_files import MERGES, TEMPLATE, TOKENS, Tiny, write

pytestmark = pytest.mark.usefixtures("cache_home")

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
END, START, STOP, UNUSED = range(4)

#: A template whose end of turn no list knows.
OWN = (
    "{% for m in messages %}<unused>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<unused>assistant\n{% endif %}"
)


def tokens_of(
    types: dict[int, int] | None,
    template: str | None = TEMPLATE,
    tokens: tuple[str, ...] = TOKENS,
    edit: Callable[[GGUFWriter], None] | None = None,
) -> Callable[[GGUFWriter], None]:
    """A byte-level vocabulary whose special tokens have these types; None: it names no types."""

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(list(tokens))
        if types is not None:
            kinds = [types.get(index, NORMAL) for index in range(len(tokens))]
            writer.add_token_types(kinds)
        writer.add_token_merges(list(MERGES))
        if template is not None:
            writer.add_chat_template(template)
        if edit is not None:
            edit(writer)

    return add


def ids(**named: int) -> Callable[[GGUFWriter], None]:
    def edit(writer: GGUFWriter) -> None:
        for name, value in named.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)

    return edit


def loaded(path: Path, add: Callable[[GGUFWriter], None]):
    return models.load(write(path, Tiny("llama"), tokenizer=add))[1]


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, None])
def test_an_end_of_turn_of_any_type_ends_the_answer(kind: int | None, tmp_path: Path) -> None:
    """By its place in the template, with no id in the metadata but that of another EOS."""
    types = None if kind is None else {END: CONTROL, START: kind, STOP: kind, UNUSED: kind}
    edit = ids(eos=END)
    tokenizer = loaded(tmp_path / "a.gguf", tokens_of(types, edit=edit))
    prompt = TemplateScript(tokenizer, None).write([], [], "the")
    assert prompt.count(START) == 2
    assert prompt.count(STOP) == 1
    assert tokenizer.decode(prompt) == ("<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n")
    assert {END, STOP} <= stop_tokens(tokenizer)
    assert START not in stop_tokens(tokenizer)
    assert {END, STOP} <= tokenizer.eos_token_ids
    # Ordinary text stays ordinary text.
    assert len(tokenizer.encode("<|im_starts|>", add_special_tokens=False)) > 1


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_an_end_that_no_list_knows(kind: int, tmp_path: Path) -> None:
    types = dict.fromkeys(range(4), kind)
    tokenizer = loaded(tmp_path / "a.gguf", tokens_of(types, OWN, edit=ids(eos=STOP)))
    prompt = TemplateScript(tokenizer, None).write([], [], "the")
    assert (prompt.count(UNUSED), prompt.count(END)) == (2, 1)
    assert tokenizer.eos_token_ids == {END, STOP}


def test_a_known_end_where_the_template_takes_no_answer_back(tmp_path: Path) -> None:
    refusing = "{% if messages[1:] %}{{ raise_exception('one turn only') }}{% endif %}" + TEMPLATE
    path = write(tmp_path / "a.gguf", Tiny("llama"), tokenizer=tokens_of({}, refusing))
    assert end_tokens(open_gguf(path)) == [STOP]
    unknown = refusing.replace("<|im_end|>", "<unused>")
    path = write(tmp_path / "b.gguf", Tiny("llama"), tokenizer=tokens_of({}, unknown))
    assert end_tokens(open_gguf(path)) == []


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_ids_in_the_metadata_name_special_tokens(name: str, tmp_path: Path) -> None:
    """Without a template, and though the file calls the token ordinary."""
    edit = ids(**{name: STOP})
    path = write(tmp_path / "a.gguf", Tiny("llama"), tokenizer=tokens_of({}, None, edit=edit))
    assert end_tokens(open_gguf(path)) == [STOP]
    _, tokenizer = models.load(path)
    assert tokenizer.eos_token_ids == {STOP}
    encoded = tokenizer.encode("the<|im_end|>the", add_special_tokens=False)
    assert encoded.count(STOP) == 1
    # Another one that nothing names is spelled out.
    assert END not in tokenizer.encode("<|end|>", add_special_tokens=False)
    wrong = write(
        tmp_path / "b.gguf",
        Tiny("llama"),
        tokenizer=tokens_of({}, None, edit=ids(**{name: 5000})),
    )
    with pytest.raises(ModelFormatError, match=f"{name}_token_id is 5000"):
        models.load(wrong)


def test_an_end_outside_the_byte_alphabet(tmp_path: Path) -> None:
    """An ordinary token is stored letter by letter; as a marker it is spelled as it is."""
    strange = "<\uff5cend\uff5c>"
    spelled = "<ï½ľendï½ľ>"
    tokens = (*TOKENS[:2], spelled, *TOKENS[3:])
    template = TEMPLATE.replace("<|im_end|>", strange)
    tokenizer = loaded(tmp_path / "a.gguf", tokens_of({}, template, tokens))
    prompt = TemplateScript(tokenizer, None).write([], [], "the")
    assert prompt.count(STOP) == 1
    assert tokenizer.eos_token_ids == {STOP}
    assert tokenizer.decode([STOP]) == strange


def test_padding_by_ordinary_text_names_no_token(tmp_path: Path) -> None:
    the = TOKENS.index("Ġthe")
    edit = ids(eos=END, padding=the, bos=the)
    tokenizer = loaded(tmp_path / "a.gguf", tokens_of({END: CONTROL}, edit=edit))
    assert tokenizer.bos_token is None
    assert tokenizer.encode(" the") == [the]
    assert tokenizer.decode([the], skip_special_tokens=True) == " the"


def test_types_must_match_the_vocabulary() -> None:
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1]}
    with pytest.raises(ModelFormatError, match="token_type"):
        vocabulary(GGUFFile(Path("x.gguf"), metadata, {}))


WRITES_BOS = "{{ bos_token }}" + TEMPLATE
#: It writes BOS in front of a system prompt only.
SOMETIMES = "{% if messages[0]['role'] == 'system' %}{{ bos_token }}{% endif %}" + TEMPLATE
NEWLINE = "\n\n" + TEMPLATE


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("template", [TEMPLATE, WRITES_BOS, SOMETIMES, NEWLINE])
def test_bos_comes_once_where_it_is_asked_for(template: str, asked: bool, tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        ids(eos=END, bos=UNUSED)(writer)
        writer.add_add_bos_token(asked)

    types = dict.fromkeys(range(4), CONTROL)
    tokenizer = loaded(tmp_path / "a.gguf", tokens_of(types, template, edit=edit))
    for system in (None, "he"):
        own = template is WRITES_BOS or (template is SOMETIMES and system is not None)
        prompt = TemplateScript(tokenizer, system).write([], [], "the")
        assert prompt.count(UNUSED) == int(asked or own)
        assert (prompt[0] == UNUSED) is (asked or own)
        rest = tokenizer.decode(prompt[int(asked or own) :])
        body = rest.removeprefix("\n\n")
        # A template's first newline is dropped by none of the two, or by both.
        assert len(rest) - len(body) == (2 if template is NEWLINE else 0)
        turn = "" if system is None else "<|im_start|>system\nhe<|im_end|>\n"
        user = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
        assert body == turn + user
    assert (tokenizer.encode("the")[0] == UNUSED) is asked


def test_a_template_that_refuses_the_probe_keeps_its_bos(tmp_path: Path) -> None:
    """It takes conversations with a system prompt only."""

    def edit(writer: GGUFWriter) -> None:
        ids(eos=END, bos=UNUSED)(writer)
        writer.add_add_bos_token(True)

    template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    )
    types = dict.fromkeys(range(4), CONTROL)
    add = tokens_of(types, template + WRITES_BOS, edit=edit)
    prompt = TemplateScript(loaded(tmp_path / "a.gguf", add), "he").write([], [], "the")
    assert prompt.count(UNUSED) == 1
    assert prompt[0] == UNUSED
