"""What is said, as tokens: inside the model's chat template, or one text after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_kvcache.errors import ConfigError

Exchange = tuple[str, str]
Message = dict[str, str]

_PROBE = "answer"


class PlainScript:
    """Turns and answers follow each other with nothing between them; BOS before the first.

    stop_tokens: the tokens that end an answer. renders_history: whether the whole conversation is
    written anew for each turn, so that a turn without an answer is left out of it.
    """

    renders_history = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = frozenset(tokenizer.eos_token_ids)

    def write(self, exchanges: Sequence[Exchange], tokens: Sequence[int], text: str) -> list[int]:
        """All tokens of the conversation, up to where the answer to `text` begins.

        exchanges: what was said and answered before; tokens: as which that stands so far.
        Raises `ConfigError` when the text has no token.
        """
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
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.stop_tokens = stop_tokens(tokenizer)
        if self._system:
            self.write([], [], _PROBE)

    def write(self, exchanges: Sequence[Exchange], tokens: Sequence[int], text: str) -> list[int]:
        """The conversation as the template renders it.

        It continues `tokens` unless the template writes earlier turns otherwise than before.
        Raises `ConfigError` when the template refuses.
        """
        messages = list(self._system)
        for user, answer in exchanges:
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
        rendered = [int(token) for token in _render(self._tokenizer, messages, tokenize=True)]
        if rendered[: len(tokens)] != list(tokens):
            whole = str(_render(self._tokenizer, messages, tokenize=False))
            spelled = spell(self._tokenizer, tokens)
            if whole.startswith(spelled):
                rest = self._tokenizer.encode(whole[len(spelled) :], add_special_tokens=False)
                rendered = [*tokens, *(int(token) for token in rest)]
        if not rendered:
            raise ConfigError("the model's chat template renders nothing of this; use --raw")
        return rendered


#: How a conversation, or a single prompt, is written down for the model.
ChatScript = PlainScript | TemplateScript


def chat_script(tokenizer: Any, system: str | None, raw: bool) -> ChatScript:
    """The script of a tokenizer: its chat template, or none under `raw` or where it has none.

    Raises `ConfigError` for a system prompt that the template refuses, or that has none to go
    into.
    """
    if not raw and tokenizer.has_chat_template:
        return TemplateScript(tokenizer, system)
    if system is not None:
        raise ConfigError(
            "the model has no chat template to put a system prompt into; leave --system out "
            "and write it into the prompt"
        )
    return PlainScript(tokenizer)


def write_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The tokens of a whole conversation in the chat template, up to where the answer begins.

    Raises `ConfigError` where there is no template, or it refuses or renders nothing.
    """
    if not tokenizer.has_chat_template:
        raise ConfigError("the model has no chat template to put messages into; give a prompt")
    hint = "change the messages"
    rendered = [int(one) for one in _render(tokenizer, list(messages), tokenize=True, hint=hint)]
    if not rendered:
        raise ConfigError(f"the model's chat template renders nothing of this; {hint}")
    return rendered


def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer inside the chat template.

    Those of the model's config, and the special token that the template puts after an answer,
    which some configs leave out.
    """
    ends = frozenset(tokenizer.eos_token_ids)
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
    try:
        whole = str(_render(tokenizer, messages, tokenize=False, add_generation_prompt=False))
    except ConfigError:
        # A template that takes no answer back has nothing to say about its end.
        return ends
    _, found, rest = whole.rpartition(_PROBE)
    after = tokenizer.encode(rest, add_special_tokens=False) if found else []
    special = set(tokenizer.all_special_ids)
    return ends | {int(token) for token in after[:1] if token in special}


def spell(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones and all spaces included."""
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _render(
    tokenizer: Any,
    messages: list[Message],
    *,
    tokenize: bool,
    add_generation_prompt: bool = True,
    hint: str = "",
) -> Any:
    """What the template makes of the messages: text, or tokens. Raises `ConfigError`."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )
    # A template is a program of its own, and may fail as any program does.
    except Exception as error:
        system = messages[0]["role"] == "system"
        hint = hint or ("leave --system out, or use --raw" if system else "use --raw")
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"the model's chat template refuses this: {kind}{error}; {hint}"
        ) from error
