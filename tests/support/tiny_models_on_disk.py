"""Write tiny models to disk, as a Hugging Face directory that loads offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import all_families, build

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and message.content == 'w9' %}"
    "{{ raise_exception('no such system prompt') }}{% endif %}"
    "w{{ 90 if message.role == 'user' else 91 }} {{ message.content }} "
    "{% endfor %}w92"
)

#: `w94` opens each message and `w95` ends it: here that is also the token that ends an answer.
TEMPLATE = (
    "{{ bos_token }} "
    "{% for message in messages %}"
    "{% if message.role != 'assistant' and message.content == 'w9' %}"
    "{{ raise_exception('not that') }}{% endif %}"
    "w94 w{{ {'system': 91, 'user': 92, 'assistant': 93}[message.role] }} "
    "{{ message.content }} w95 "
    "{% endfor %}{% if add_generation_prompt %}w94 w93{% endif %}"
)
#: Writes each earlier answer without its first word, as some templates do with reasoning.
FORGETFUL = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content.split(' ')[1:] | join(' ') if message.role == 'assistant' "
    "else message.content }}",
)


def words(*numbers: int) -> str:
    """A prompt whose token ids are these numbers (3 to 95)."""
    return " ".join(f"w{number}" for number in numbers)


def config_of(family: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The tiny config of a family, with some top fields changed."""
    return {**all_families()[family], **(changes or {})}


def write_model(
    directory: Path,
    family: str = "llama",
    changes: Mapping[str, Any] | None = None,
    chat: bool = False,
    without: str = "",
    template: str | None = None,
    special: Sequence[str] = (),
) -> Path:
    """A model of `family` with random weights, and a tokenizer of 96 words.

    It has a chat template: the usual one under `chat`, or `template`. special: words that are
    special tokens too.
    """
    config = config_of(family, changes)
    config.pop(without, None)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(build(family, config).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, 96))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
    )
    if chat or template is not None:
        wrapped.chat_template = CHAT_TEMPLATE if template is None else template
    wrapped.save_pretrained(directory)
    return directory


def write_chat_model(
    directory: Path,
    family: str = "llama",
    template: str | None = TEMPLATE,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A tiny model whose tokenizer puts BOS before a text, with a chat template or without."""
    write_model(directory, family, changes)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(path))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
