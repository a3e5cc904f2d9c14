"""Which tokens of a GGUF file are more than text, whatever type the file gives them.

Files exist whose end of turn is marked as ordinary text: it would be spelled out letter by letter,
and no answer would end. What the metadata names by its id, and what the chat template writes, is
one token; what ends a turn ends an answer.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models

from mlx_kvcache.errors import ModelFormatError
from mlx_kvcache.models.gguf_file import GGUFFile

# ggml's token types.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Tokens that end a turn: generation stops there if the chat template uses them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")

# What a token looks like that is written for a model, not for a reader.
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]{2,}\]")

_PROBE = "answer"

#: The tokens of a vocabulary and their types.
Vocabulary = tuple[list[str], list[int]]


def vocabulary(file: GGUFFile) -> Vocabulary:
    """The file's tokens and types, the special ones marked as such and spelled as they are.

    Raises ModelFormatError for an id outside the vocabulary, or types that do not match it.
    """
    tokens = list(file.require("tokenizer.ggml.tokens", list))
    given = file.find("tokenizer.ggml.token_type", list)
    if given is not None and len(given) != len(tokens):
        raise ModelFormatError(
            f"{file.path.name}: {len(given)} entries in tokenizer.ggml.token_type for "
            f"{len(tokens)} tokens"
        )
    types = [int(kind) for kind in given] if given is not None else [NORMAL] * len(tokens)
    byte_level = file.find("tokenizer.ggml.model", str) == "gpt2"
    ends = frozenset(end_tokens(file))
    for index in _written(file, types, byte_level):
        if types[index] == NORMAL:
            tokens[index] = _text(tokens[index], byte_level)
            types[index] = USER_DEFINED
    for index in ends:
        if types[index] == NORMAL:
            tokens[index] = _text(tokens[index], byte_level)
        types[index] = CONTROL
    return tokens, types


def end_tokens(file: GGUFFile) -> list[int]:
    """The ids at which generation stops, ascending.

    EOS, the end of a turn and of a message, known ends that the chat template uses, and what it
    writes behind an answer.
    """
    tokens = file.require("tokenizer.ggml.tokens", list)
    ids = {index for key in _END_KEYS if (index := token_id(file, key)) is not None}
    template = file.find("tokenizer.chat_template", str) or ""
    ids |= {tokens.index(end) for end in _TURN_ENDS if end in template and end in tokens}
    if (behind := _behind_answer(file)) is not None:
        ids.add(behind)
    return sorted(ids)


def token_id(file: GGUFFile, key: str) -> int | None:
    """The id under `tokenizer.ggml.<key>`, or None. Raises ModelFormatError for none that is."""
    index = file.find(f"tokenizer.ggml.{key}", int)
    count = len(file.require("tokenizer.ggml.tokens", list))
    if index is not None and not 0 <= index < count:
        raise ModelFormatError(
            f"{file.path.name}: {key} is {index}, the vocabulary has {count} tokens"
        )
    return index


def special_token(file: GGUFFile, key: str, words: Vocabulary) -> str | None:
    """The text of the special token under `tokenizer.ggml.<key>`, or None where there is none.

    words: the file's `vocabulary`. An id of ordinary text, as some files have it for padding,
    names none: it would be cut out of every text.
    """
    index = token_id(file, key)
    tokens, types = words
    return None if index is None or types[index] == NORMAL else tokens[index]


def chat_template(file: GGUFFile, bos: str | None) -> str | None:
    """The file's chat template; it begins what it writes with `bos`, once, unless that is None."""
    template = file.find("tokenizer.chat_template", str)
    if template is None or bos is None:
        return template
    rendered = _rendered(file, template, [{"role": "user", "content": _PROBE}])
    if rendered is not None and rendered.startswith(bos):
        return template
    # It may still write it in other conversations, so what it wrote is looked at each time. A
    # first newline would be taken for the end of the tag's line.
    first = "\n" if template.startswith("\n") else ""
    return (
        "{% set written %}" + first + template + "{% endset %}"
        "{% if not written.startswith(bos_token) %}{{ bos_token }}{% endif %}{{ written }}"
    )


def _written(file: GGUFFile, types: list[int], byte_level: bool) -> list[int]:
    """The ids of ordinary tokens that the chat template, or the rule for BOS, writes as one."""
    template = file.find("tokenizer.chat_template", str) or ""
    tokens = file.require("tokenizer.ggml.tokens", list)
    bos = token_id(file, "bos_token_id")
    found = []
    if bos is not None and file.find("tokenizer.ggml.add_bos_token", bool):
        found.append(bos)
    for index, token in enumerate(tokens):
        if types[index] != NORMAL or token[:1] not in ("<", "["):
            continue
        text = _text(token, byte_level)
        if _MARKER.fullmatch(text) and (index == bos or text in template):
            found.append(index)
    return found


def _behind_answer(file: GGUFFile) -> int | None:
    """The id of the marker that the chat template writes right behind an answer."""
    template = file.find("tokenizer.chat_template", str)
    if template is None:
        return None
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
    _, found, rest = (_rendered(file, template, messages) or "").rpartition(_PROBE)
    marker = _MARKER.match(rest.lstrip()) if found else None
    if marker is None:
        return None
    byte_level = file.find("tokenizer.ggml.model", str) == "gpt2"
    for index, token in enumerate(file.require("tokenizer.ggml.tokens", list)):
        if token[:1] == marker[0][:1] and marker[0] in (token, _text(token, byte_level)):
            return index
    return None


def _rendered(file: GGUFFile, template: str, messages: list[dict[str, str]]) -> str | None:
    """What the template makes of the messages; None where it refuses them."""
    tokens = file.require("tokenizer.ggml.tokens", list)
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
    known: dict[str, Any] = {
        name: tokens[index]
        for name, key in names.items()
        if (index := token_id(file, key)) is not None
    }
    from transformers import PreTrainedTokenizerFast

    writer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **known)
    try:
        return str(writer.apply_chat_template(messages, chat_template=template, tokenize=False))
    # A template is a program of its own, and may fail as any program does.
    except Exception:
        return None


def _text(token: str, byte_level: bool) -> str:
    """A token as text; byte-level vocabularies spell ordinary ones in an alphabet of bytes."""
    if not byte_level:
        return token.replace("▁", " ")
    alphabet = _bytes_of_letters()
    if not all(letter in alphabet for letter in token):
        return token
    return bytes(alphabet[letter] for letter in token).decode("utf-8", errors="replace")


@cache
def _bytes_of_letters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
