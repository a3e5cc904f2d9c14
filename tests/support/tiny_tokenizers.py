"""Tokenizers of the usual kinds with tiny vocabularies, which decode as the real ones do."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<think>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
#: Words of a sentencepiece model: an underscore for each space.
PIECES = [
    "\u2581",
    "\u2581\u2581",
    "\u2581the",
    "\u2581Paris",
    "is",
    "\n",
    "\u20ac",
    "\ufffd",
    "<0x",
    "e\u0301",
]


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<think>"],
    )


def _numbered(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's, Qwen's: tokens are bytes, some of them parts of characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    words = ["", " the", " Paris", " ", "  ", "\n\n", "\u20ac", "\ufffd", "\U0001f600"]
    encoded = ["".join(piece for piece, _ in spell(word)) for word in words]
    halves = [encoded[-1][:2], encoded[-1][2:], encoded[-3][1:] + encoded[1]]
    tokenizer = Tokenizer(models.BPE(_numbered([*SPECIAL, *letters, *encoded, *halves]), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("\u00bfqu\u00e9?"), AddedToken(" two words ")])
    return _wrapped(tokenizer)


def _byte_fallback(*strip: decoders.Decoder) -> PreTrainedTokenizerFast:
    vocabulary = _numbered(["<unk>", *SPECIAL, *BYTES, *PIECES])
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    replace, fuse = decoders.Replace("\u2581", " "), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), fuse, *strip])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return _wrapped(tokenizer)


def sentencepiece_with_a_first_space() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral's: a text's first space is none of its own."""
    return _byte_fallback(decoders.Strip(" ", 1, 0))


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Gemma's."""
    return _byte_fallback()


def metaspace() -> PreTrainedTokenizerFast:
    """As T5's: a unigram model over pieces with underscores, without byte tokens."""
    pieces = [(name, -1.0) for name in ["<unk>", *SPECIAL, *PIECES]]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's: words, and parts of words behind `##`."""
    names = ["[UNK]", *SPECIAL, "the", "Paris", "##is", "##", "##s", ".", ",", "'", "n't", "\ufffd"]
    tokenizer = Tokenizer(models.WordPiece(_numbered(names), unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrapped(tokenizer)


def words() -> PreTrainedTokenizerFast:
    """Whole words with a space between them; no decoder."""
    names = ["<unk>", *SPECIAL, "the", "Paris", "is", "\ufffd"]
    return _wrapped(Tokenizer(models.WordLevel(_numbered(names), unk_token="<unk>")))


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    each.__name__: each
    for each in (
        byte_level,
        sentencepiece,
        sentencepiece_with_a_first_space,
        metaspace,
        wordpiece,
        words,
    )
}
