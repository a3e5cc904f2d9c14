"""The turns of a conversation as tokens: inside the model's chat template, or one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_kvcache.errors import ConfigError

Exchange = tuple[str, str]
Message = dict[str, str]

_PROBE = "answer"


class ChatScript(Protocol):
    """How a conversation is written down for the model.

    end_tokens: the tokens that end an answer. renders_history: whether the whole conversation is
    written anew for each turn, so that a turn without an answer is left out of it.
    """

    end_tokens: frozenset[int]
    renders_history: bool

    def write(self, exchanges: Sequence[Exchange], tokens: Sequence[int], text: str) -> list[int]:
        """All tokens of the conversation, up to where the answer to `text` begins.

        exchanges: what was said and answered before; tokens: as which that stands so far. The
        result continues them wherever the conversation reads the same. Raises `ConfigError`.
        """


def chat_script(tokenizer: Any, system: str | None, raw: bool) -> ChatScript:
    """The script of a tokenizer: its chat template, or none under `raw` or where it has none.

    Raises `ConfigError` for a system prompt that has no template to go into.
    """
    if not raw and tokenizer.has_chat_template:
        return TemplateScript(tokenizer, system)
    if system is not None:
        raise ConfigError(
            "the model has no chat template to put a system prompt into; leave --system out "
            "and write it into the first turn"
        )
    return PlainScript(tokenizer)


class PlainScript:
    """Turns and answers follow each other with nothing between them; BOS before the first."""

    renders_history = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end_tokens = frozenset(tokenizer.eos_token_ids)

    def write(self, exchanges: Sequence[Exchange], tokens: Sequence[int], text: str) -> list[int]:
        """The tokens so far and those of `text`. `ConfigError` when it has none."""
        del exchanges
        bos = self._tokenizer.bos_token
        special = not tokens and (bos is None or not text.startswith(bos))
        added = self._tokenizer.encode(text, add_special_tokens=special)
        if not added:
            raise ConfigError("the text has no token of this model; give some other text")
        return [*tokens, *(int(token) for token in added)]


class TemplateScript:
    """The chat template of the tokenizer, rendered anew over the whole conversation each turn.

    Rendered and encoded again, an answer can come out in other tokens than those that the model
    chose. Where the text is the same, the chosen ones are kept, as they are what was said.
    """

    renders_history = True

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self.end_tokens = frozenset(tokenizer.eos_token_ids) | self._turn_end()

    def write(self, exchanges: Sequence[Exchange], tokens: Sequence[int], text: str) -> list[int]:
        """The conversation as the template renders it.

        It continues `tokens` unless the template writes earlier turns otherwise than before.
        Raises `ConfigError` when the template refuses.
        """
        messages = self._messages(exchanges, text)
        rendered: list[int] = [int(token) for token in self._render(messages, tokenize=True)]
        if rendered[: len(tokens)] != list(tokens):
            whole = str(self._render(messages, tokenize=False))
            spelled = spell(self._tokenizer, tokens)
            if whole.startswith(spelled):
                rest = self._tokenizer.encode(whole[len(spelled) :], add_special_tokens=False)
                rendered = [*tokens, *(int(token) for token in rest)]
        if not rendered:
            raise ConfigError("the model's chat template renders nothing of this; use --raw")
        return rendered

    def _messages(self, exchanges: Sequence[Exchange], text: str) -> list[Message]:
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for user, answer in exchanges:
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
        return messages

    def _render(self, messages: list[Message], tokenize: bool, prompt: bool = True) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=tokenize, add_generation_prompt=prompt
            )
        except TemplateError as error:
            hint = "leave --system out, or use --raw" if self._system is not None else "use --raw"
            raise ConfigError(f"the model's chat template refuses this: {error}; {hint}") from error

    def _turn_end(self) -> frozenset[int]:
        """The special token that the template puts after an answer, which some configs leave out.

        Raises `ConfigError` when the template refuses the system prompt.
        """
        messages = self._messages([], "question")
        messages.append({"role": "assistant", "content": _PROBE})
        whole = str(self._render(messages, tokenize=False, prompt=False))
        _, found, rest = whole.rpartition(_PROBE)
        after = self._tokenizer.encode(rest, add_special_tokens=False) if found else []
        special = set(self._tokenizer.all_special_ids)
        return frozenset(int(token) for token in after[:1] if token in special)


def spell(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones and all spaces included."""
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text
