"""Tokenizers out of GGUF metadata, against the tokenizers that the metadata was taken from."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from tokenizers.trainers import BpeTrainer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

import mlx_kvcache.models as models
from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.models.gguf_file import open_gguf
from mlx_kvcache.models.gguf_special import end_tokens
from mlx_kvcache.models.gguf_tokenizer import tokenizer_from
from tests.support.gguf_files import TEMPLATE, TOKENS, Tiny, byte_tokenizer, write

TEXTS = (
    "The capital of France is Paris.",
    "  two leading spaces, and two trailing  ",
    "\n\nnew\nlines\r\n\ttabs\t\t",
    "I'll don't WE'RE they've",
    "12345 2024-01-02 3.14159 x2y",
    "naïve café über Ångström",
    "nai\u0308ve cafe\u0301",
    "日本語 中文 한국어 العربية עברית हिन्दी ไทย",
    "🙂👨‍👩‍👧🇫🇷 emoji",
    "²½ ١٢٣ ⅷ",
    "def f(x):\n    return x ** 2  # square\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    " ",
    "a" * 70,
    "\u200b\u00a0\ufeff odd spaces",
)

CORPUS = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "I'll say that they're here, we've seen it, and he doesn't know.",
    "In 1889 and 2024 there were 12345 visitors; 3.14159 is not an integer.",
    "naïve café über Ångström 日本語 中文 русский язык",
    "def f(x):\n    return x ** 2\n\nfor i in range(10):\n\tprint(i)\n",
] * 20


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tuple[list[str], list[str], Tokenizer]:
    """A byte-level BPE trained on the corpus: its tokens, its merges, and itself."""
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    return tokens, [" ".join(pair) for pair in content["merges"]], tokenizer


def bpe(
    tokens: list[str], merges: list[str], pre: str | None, special: int = 3
) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * special + [1] * (len(tokens) - special))
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)

    return add


def read(path: Path, add: Callable[[GGUFWriter], None], family: str = "llama") -> Tokenizer:
    """The tokenizer of a tiny model's file, whose embedding has room for `add`'s tokens."""
    tiny = Tiny(family, options={"vocab_size": 1200})
    return tokenizer_from(open_gguf(write(path, tiny, tokenizer=add)), family)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_smollm_splits_digits_then_as_gpt2(tmp_path: Path) -> None:
    digits = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    # Merges trained without the digit split do join digits, so the split matters.
    tokens, merges, original = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    original.pre_tokenizer = digits
    smollm = read(tmp_path / "a.gguf", bpe(tokens, merges, "smollm"))
    plain = read(tmp_path / "b.gguf", bpe(tokens, merges, "gpt-2"))
    for text in TEXTS:
        assert ids(smollm, text) == ids(original, text), text
    assert ids(plain, TEXTS[4]) != ids(smollm, TEXTS[4])
    for text in TEXTS:
        assert smollm.decode(ids(smollm, text), skip_special_tokens=False) == text


def test_qwen2_matches_transformers_own_class(tmp_path: Path) -> None:
    tokens, merges, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    original = Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=pairs,
        extra_special_tokens=tokens[1:3],
    )
    mine = read(tmp_path / "a.gguf", bpe(tokens, merges, "qwen2"), "qwen2")
    unnamed = read(tmp_path / "b.gguf", bpe(tokens, merges, None), "qwen2")
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False)
        assert ids(mine, text) == expected, text
        assert ids(unnamed, text) == expected, text
    other = read(tmp_path / "c.gguf", bpe(tokens, merges, "gpt-2"), "qwen2")
    assert any(ids(other, text) != ids(mine, text) for text in TEXTS)


def test_whole_pieces_of_llama3_are_not_cut(tmp_path: Path) -> None:
    """A piece in the vocabulary that no merge reaches is one token for Llama 3 alone."""
    tokens, merges, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    add = bpe([*tokens, "zqzq"], merges, "llama-bpe")
    tokenizer = read(tmp_path / "a.gguf", add)
    assert ids(tokenizer, "zqzq") == [len(tokens)]
    plain = read(tmp_path / "b.gguf", bpe([*tokens, "zqzq"], merges, "gpt-2"))
    assert len(ids(plain, "zqzq")) > 1


def test_no_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    """GPT-2's own <|endoftext|> is not slipped in behind a vocabulary that lacks it."""
    tokenizer = read(tmp_path / "a.gguf", byte_tokenizer)
    assert tokenizer.get_vocab_size() == len(TOKENS)
    assert tokenizer.token_to_id("<|endoftext|>") is None
    assert max(ids(tokenizer, "<|endoftext|>")) < len(TOKENS)
    assert ids(tokenizer, "<|im_start|>") == [TOKENS.index("<|im_start|>")]


def test_special_tokens_outside_the_byte_alphabet(tmp_path: Path) -> None:
    tokens, merges, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    strange = "<\uff5cbegin▁of▁sentence\uff5c>"

    def add(writer: GGUFWriter) -> None:
        bpe([strange, *tokens], merges, "deepseek-r1-qwen", special=4)(writer)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    tokenizer = read(tmp_path / "a.gguf", add, "qwen2")
    assert tokenizer.get_vocab_size() == len(tokens) + 1
    assert tokenizer.encode(f"hi {strange}").ids[0] == 0
    assert ids(tokenizer, f"hi {strange}")[-1] == 0
    assert tokenizer.decode([0], skip_special_tokens=False) == strange


def test_unknown_split_or_kind_is_refused(tmp_path: Path) -> None:
    tokens, merges, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    with pytest.raises(UnsupportedModelError, match=r"'viking'.*smollm"):
        read(tmp_path / "a.gguf", bpe(tokens, merges, "viking"))
    with pytest.raises(UnsupportedModelError, match="None"):
        read(tmp_path / "b.gguf", bpe(tokens, merges, None))

    def rwkv(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(tokens)

    with pytest.raises(UnsupportedModelError, match="rwkv"):
        read(tmp_path / "c.gguf", rwkv)


def test_contradicting_vocabularies_are_refused(tmp_path: Path) -> None:
    def bos_outside(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.bos_token_id"].value = 5000
        writer.add_add_bos_token(True)

    def twice(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*TOKENS, "he"])
        writer.add_token_merges(["h e"])

    def no_merges(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(list(TOKENS))

    def short_types(writer: GGUFWriter) -> None:
        no_merges(writer)
        writer.add_token_merges(["h e"])
        writer.add_token_types([1, 1])

    tiny = Tiny("llama", options={"vocab_size": 1200})
    with pytest.raises(ModelFormatError, match=r"bos_token_id is 5000"):
        tokenizer_from(open_gguf(write(tmp_path / "a.gguf", tiny, edit=bos_outside)), "llama")
    for add, word in ((twice, "twice"), (no_merges, "merges"), (short_types, "token_type")):
        with pytest.raises(ModelFormatError, match=word):
            read(tmp_path / f"{add.__name__}.gguf", add)


def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback, trained as Llama 2's was."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm(
    processor: sentencepiece.SentencePieceProcessor, prefix: bool | None = None
) -> Callable[[GGUFWriter], None]:
    count = processor.vocab_size()

    def kind(index: int) -> int:
        if processor.is_unknown(index):
            return 2
        if processor.is_control(index):
            return 3
        return 6 if processor.is_byte(index) else 1

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([processor.id_to_piece(i) for i in range(count)])
        writer.add_token_scores([processor.get_score(i) for i in range(count)])
        writer.add_token_types([kind(i) for i in range(count)])
        writer.add_bos_token_id(processor.bos_id())
        writer.add_eos_token_id(processor.eos_id())
        writer.add_unk_token_id(processor.unk_id())
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    return add


def test_sentencepiece_matches_sentencepiece(tmp_path: Path) -> None:
    processor = sentencepiece_model()
    tokenizer = read(tmp_path / "a.gguf", spm(processor))
    shuffler = random.Random(0)
    words = [w for line in CORPUS[:5] for w in line.split(" ")]
    mixed = [" ".join(shuffler.sample(words, 6)) for _ in range(30)]
    for text in (*(t for t in TEXTS if t), *mixed):
        expected = processor.encode(text)
        assert ids(tokenizer, text) == expected, text
        assert tokenizer.decode(expected) == processor.decode(expected), text
    assert tokenizer.encode("hi").ids == [processor.bos_id(), *processor.encode("hi")]


def test_sentencepiece_without_the_prefix_space(tmp_path: Path) -> None:
    processor = sentencepiece_model()
    tokenizer = read(tmp_path / "a.gguf", spm(processor, prefix=False))
    with_prefix = read(tmp_path / "b.gguf", spm(processor, prefix=True))
    for text in (t for t in TEXTS if t.strip()):
        assert ids(tokenizer, f" {text}") == processor.encode(text), text
        assert tokenizer.decode(ids(tokenizer, text)) == text
    assert ids(tokenizer, "The") != ids(with_prefix, "The")


@pytest.mark.usefixtures("cache_home")
def test_what_mlx_lm_loads(tmp_path: Path) -> None:
    """Through the written files: same ids, BOS as asked, ends of turn, chat template."""
    path = write(tmp_path / "t.gguf", Tiny("llama"))
    _, loaded = models.load(path)
    direct = tokenizer_from(open_gguf(path), "llama")
    for text in TEXTS:
        assert loaded.encode(text, add_special_tokens=False) == ids(direct, text), text
        assert loaded.decode(ids(direct, text)) == text
    assert loaded.eos_token_ids == {0, 2}
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (
        "<|im_start|>",
        "<|end|>",
        "<|im_end|>",
    )
    chat = [{"role": "user", "content": "the"}]
    rendered = loaded.apply_chat_template(chat, add_generation_prompt=True)
    text = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == ids(direct, text)
    assert loaded.encode("the") == ids(direct, "the")

    def with_bos(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(True)

    _, loaded = models.load(write(tmp_path / "bos.gguf", Tiny("llama"), edit=with_bos))
    assert loaded.encode("the") == [1, *ids(direct, "the")]


def test_end_tokens(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(3)

    assert end_tokens(open_gguf(write(tmp_path / "a.gguf", Tiny("llama")))) == [0, 2]
    assert end_tokens(open_gguf(write(tmp_path / "b.gguf", Tiny("llama"), edit=more))) == [0, 2, 3]

    def no_template(writer: GGUFWriter) -> None:
        assert writer.kv_data[0].pop("tokenizer.chat_template").value == TEMPLATE

    path = write(tmp_path / "c.gguf", Tiny("llama"), edit=no_template)
    assert end_tokens(open_gguf(path)) == [0]
