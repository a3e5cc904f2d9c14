"""A GGUF file's tokenizer as `tokenizer.json`, its config and its chat template.

transformers rebuilds the vocabulary and the merges; what it leaves out is added here: the split
of pre-tokenizers that it does not know, the prefix space and BOS as the file asks for them.
A tokenizer that cannot be rebuilt exactly is refused, since other tokens are another prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors

from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.models.gguf_file import GGUFFile
from mlx_kvcache.models.gguf_special import (
    CONTROL,
    USER_DEFINED,
    Vocabulary,
    chat_template,
    end_tokens,
    special_token,
    vocabulary,
)
from mlx_kvcache.models.store import write_json

# llama.cpp's names of the splits of byte-level vocabularies that transformers' own table (or
# its GPT-2 default) reproduces. Another split gives other tokens, so the rest is refused.
_KNOWN_SPLITS = frozenset(
    {
        "deepseek-r1-qwen",
        "falcon3",
        "gpt-2",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "qwen2",
        "smaug-bpe",
        "smollm",
        "tekken",
    }
)

# Vocabularies in which a piece that is a whole token is never cut, whatever the merges say.
_WHOLE_PIECES = frozenset({"falcon3", "llama-bpe", "llama-v3", "llama3", "tekken"})

# Vocabularies that begin with BOS where the file does not say (llama.cpp's load_vocab).
_BOS_SPLITS = frozenset({"falcon3", "llama-bpe", "llama-v3", "llama3", "tekken"})


def tokenizer_from(file: GGUFFile, architecture: str) -> Tokenizer:
    """The tokenizer described by the file's metadata.

    Raises UnsupportedModelError for a vocabulary kind or split that is not known,
    ModelFormatError for a vocabulary that contradicts itself.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    kind = file.require("tokenizer.ggml.model", str)
    split = _split(file, architecture, kind)
    tokens, types = vocabulary(file)
    description = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": split,
        "tokens": tokens,
        "scores": file.find("tokenizer.ggml.scores", list),
        "token_type": types,
        "merges": file.find("tokenizer.ggml.merges", list),
    }
    present = {key: value for key, value in description.items() if value is not None}
    _check_vocabulary(file, present)
    try:
        tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, present)[0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelFormatError(
            f"{file.path.name}: no tokenizer can be built from its metadata ({error})"
        ) from error
    tokenizer = _with_exact_vocabulary(file, tokenizer, present)
    if kind == "gpt2":
        _finish_byte_level(tokenizer, split)
    elif architecture != "gemma3":
        prefix = file.find("tokenizer.ggml.add_space_prefix", bool)
        _set_spaces(tokenizer, prefix=prefix is not False)
    _set_bos(file, tokenizer, (tokens, types), kind, split)
    return tokenizer


def write_tokenizer(file: GGUFFile, architecture: str, directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    tokenizer = tokenizer_from(file, architecture)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        # The generic class takes tokenizer.json as it is; a model's own class rebuilds it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.find(f"{architecture}.context_length", int),
        "add_bos_token": bool(tokenizer.encode("").ids),
        "add_eos_token": False,
    }
    words = vocabulary(file)
    for name, key in _SPECIAL.items():
        if (token := special_token(file, key, words)) is not None:
            config[name] = token
    bos = config.get("bos_token") if config["add_bos_token"] else None
    if template := chat_template(file, bos):
        config["chat_template"] = template
    write_json(directory / "tokenizer_config.json", config)
    generation = {
        "bos_token_id": file.find("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": end_tokens(file),
    }
    present = {key: value for key, value in generation.items() if value not in (None, [])}
    write_json(directory / "generation_config.json", present)


_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _split(file: GGUFFile, architecture: str, kind: str) -> str | None:
    if kind == "llama":
        return None
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{file.path.name}: a tokenizer of kind {kind!r} is not known; 'llama' (SentencePiece) "
            "and 'gpt2' (byte-level BPE) are"
        )
    split = file.find("tokenizer.ggml.pre", str)
    if split is None and architecture in ("qwen2", "qwen3"):
        return "qwen2"
    if split not in _KNOWN_SPLITS:
        raise UnsupportedModelError(
            f"{file.path.name}: the pre-tokenizer {split!r} is not known, and guessing it would "
            f"give wrong tokens; known are {', '.join(sorted(_KNOWN_SPLITS))}. Load the model from "
            "its Hugging Face directory instead"
        )
    return split


def _check_vocabulary(file: GGUFFile, description: dict[str, Any]) -> None:
    count = len(description["tokens"])
    if "scores" in description and len(description["scores"]) != count:
        raise ModelFormatError(
            f"{file.path.name}: {len(description['scores'])} entries in tokenizer.ggml.scores "
            f"for {count} tokens"
        )
    if "merges" not in description and "scores" not in description:
        raise ModelFormatError(f"{file.path.name}: the vocabulary has neither merges nor scores")


def _with_exact_vocabulary(
    file: GGUFFile, tokenizer: Tokenizer, description: dict[str, Any]
) -> Tokenizer:
    """The tokenizer with exactly the file's tokens at the file's ids.

    transformers adds its classes' default special tokens after a vocabulary that lacks them,
    and does not recognize a special token written outside the byte alphabet. Either would give
    ids for which the model has no embedding.
    """
    tokens = description["tokens"]
    special = {
        token: (index, kind == CONTROL)
        for index, (token, kind) in enumerate(zip(tokens, description["token_type"], strict=True))
        if kind in (CONTROL, USER_DEFINED)
    }
    byte_level = description["tokenizer_type"] == "gpt2"
    lost = {t: v for t, v in special.items() if byte_level and tokenizer.token_to_id(t) is None}
    if tokenizer.get_vocab_size() > len(tokens) or lost:
        tokenizer = _edited(tokenizer, len(tokens), lost)
    ids = set(tokenizer.get_vocab().values())
    if len(ids) != len(tokens) or max(ids) >= len(tokens):
        raise ModelFormatError(
            f"{file.path.name}: its {len(tokens)} tokens make {len(ids)} entries; the vocabulary "
            "has the same token twice"
        )
    return tokenizer


def _edited(tokenizer: Tokenizer, count: int, lost: dict[str, tuple[int, bool]]) -> Tokenizer:
    """Drop added tokens from id `count` on, and spell the `lost` special tokens as they are."""
    content = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    spelled = {index: token for token, (index, _) in lost.items()}
    content["model"]["vocab"] = {spelled.get(i, token): i for token, i in vocab.items()}
    added = [entry for entry in content["added_tokens"] if entry["id"] < count]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added += [
        {"id": index, "content": token, "special": control, **plain}
        for token, (index, control) in lost.items()
    ]
    content["added_tokens"] = sorted(added, key=lambda entry: entry["id"])
    return Tokenizer.from_str(json.dumps(content))


def _finish_byte_level(tokenizer: Tokenizer, split: str | None) -> None:
    if split == "smollm":
        # Digits one by one, then GPT-2's split.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if split == "qwen2":
        # Qwen composes accents before it looks tokens up; llama.cpp does not.
        tokenizer.normalizer = normalizers.NFC()
    if split in _WHOLE_PIECES:
        tokenizer.model.ignore_merges = True


def _set_spaces(tokenizer: Tokenizer, prefix: bool) -> None:
    """Spell spaces as SentencePiece does, with its dummy prefix before every piece of text.

    transformers' Metaspace leaves the prefix out where the text begins with a space.
    """
    spell = normalizers.Replace(" ", "▁")
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spell])
        tokenizer.decoder = decoders.Sequence([*decode, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spell
        tokenizer.decoder = decoders.Sequence(decode)
    tokenizer.pre_tokenizer = None


def _set_bos(
    file: GGUFFile, tokenizer: Tokenizer, words: Vocabulary, kind: str, split: str | None
) -> None:
    asked = file.find("tokenizer.ggml.add_bos_token", bool)
    adds = asked if asked is not None else kind == "llama" or split in _BOS_SPLITS
    bos = special_token(file, "bos_token_id", words)
    if not adds or bos is None:
        return
    identifier = file.require("tokenizer.ggml.bos_token_id", int)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
        special_tokens=[(bos, identifier)],
    )
