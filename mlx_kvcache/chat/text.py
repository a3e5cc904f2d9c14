"""What is said, as tokens: inside the model's chat template, or one text after another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_kvcache.control.history import common_prefix
from mlx_kvcache.errors import ConfigError

Exchange = tuple[str, str]
Message = dict[str, str]

_PROBE = "answer"
_THOUGHTS = "analysis"
#: The name of a channel, and what is said in it.
_CHANNEL = re.compile(
    r"<\|channel\|>(\w+).*?<\|message\|>(.*?)(?=<\|(?:end|call|start)\|>|\Z)", re.DOTALL
)
#: What a template takes that follows from the conversation, or from how it is written down.
_RESERVED = frozenset(
    (
        "conversation",
        "messages",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)


class PlainScript:
    """Turns and answers follow each other with nothing between them; BOS before the first.

    stop_tokens: the tokens that end an answer. renders_history: whether the whole conversation is
    written anew for each turn, so that a turn without an answer is left out of it.
    """

    renders_history = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = frozenset(tokenizer.eos_token_ids)

    def write(
        self,
        exchanges: Sequence[Exchange],
        tokens: Sequence[int],
        text: str,
        prefill: str = "",
    ) -> list[int]:
        """All tokens of the conversation, up to where the answer to `text` begins.

        exchanges: what was said and answered before; tokens: as which that stands so far.
        prefill: how the answer begins; its tokens come last. Raises `ConfigError` when the text
        has no token.
        """
        del exchanges
        added = _encode(self._tokenizer, text)
        if not added:
            raise ConfigError("the text has no token of this model; give some other text")
        begun = _extended(self._tokenizer, added, text, prefill)
        return [*tokens, *begun] if tokens else _opened(self._tokenizer, begun)

    def stays(self, exchanges: Sequence[Exchange], text: str, target: Sequence[int]) -> int:
        """How many tokens of what was written for `text` the next turn begins with."""
        del exchanges, text
        return len(target)


class TemplateScript:
    """The chat template of the tokenizer, rendered anew over the whole conversation each turn.

    Rendered and encoded again, an answer can come out in other tokens than those that the model
    chose. Where the text is the same, the chosen ones are kept, as they are what was said.

    arguments: what the template is given besides the messages, by name.
    """

    renders_history = True

    def __init__(
        self, tokenizer: Any, system: str | None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.stop_tokens = stop_tokens(tokenizer, self._arguments)
        if self._system:
            self.write([], [], _PROBE)

    def write(
        self,
        exchanges: Sequence[Exchange],
        tokens: Sequence[int],
        text: str,
        prefill: str = "",
    ) -> list[int]:
        """The conversation as the template renders it, up to where the answer to `text` begins.

        It continues `tokens` unless the template writes earlier turns otherwise than before; then
        it keeps of them what can be kept. prefill: how the answer begins; its tokens come last,
        after all that the template puts before an answer. Raises `ConfigError` when the template
        refuses.
        """
        messages = self._messages(exchanges, text)
        rendered = self._rendered(messages)
        if rendered[: len(tokens)] != list(tokens):
            rendered = self._continued(tokens, self._text(messages)) or rendered
        return self._begun(messages, rendered, prefill)

    def write_messages(self, messages: Sequence[Message], prefill: str = "") -> list[int]:
        """A whole conversation, its own system prompt included, up to where the answer begins.

        prefill: how the answer begins. Raises `ConfigError` when the template refuses.
        """
        said = list(messages)
        return self._begun(said, self._rendered(said, "change the messages"), prefill)

    def stays(self, exchanges: Sequence[Exchange], text: str, target: Sequence[int]) -> int:
        """How many tokens of what was written for `text` the next turn begins with.

        Fewer than all where the template puts before an answer what it leaves out of an earlier
        one, or writes an earlier message otherwise.
        """
        messages = self._messages([*exchanges, (text, _PROBE)], _PROBE)
        try:
            whole = self._text(messages)
        except ConfigError:
            return len(target)
        encoded = _opened(self._tokenizer, _encode(self._tokenizer, whole))
        return max(common_prefix(target, encoded), self._agreement(target, whole))

    def _rendered(self, messages: list[Message], hint: str = "") -> list[int]:
        """The template's tokens of the messages. hint: what to do where it refuses."""
        written = _render(self._tokenizer, messages, self._arguments, tokenize=True, hint=hint)
        rendered = _opened(self._tokenizer, [int(token) for token in written])
        if not rendered:
            raise ConfigError(
                f"the model's chat template renders nothing of this; {hint or 'use --raw'}"
            )
        return rendered

    def _begun(self, messages: list[Message], rendered: list[int], prefill: str) -> list[int]:
        """What was rendered, and the beginning of the answer behind it."""
        if not prefill:
            return rendered
        return _extended(self._tokenizer, rendered, self._text(messages), prefill)

    def _messages(self, exchanges: Sequence[Exchange], text: str) -> list[Message]:
        messages = list(self._system)
        for user, answer in exchanges:
            messages.append({"role": "user", "content": user})
            messages.append(answer_message(answer))
        return [*messages, {"role": "user", "content": text}]

    def _text(self, messages: list[Message]) -> str:
        return str(_render(self._tokenizer, messages, self._arguments))

    def _continued(self, tokens: Sequence[int], whole: str) -> list[int]:
        """What spells `whole` and begins with as many of `tokens` as can be; or nothing."""
        count = self._agreement(tokens, whole)
        rest = whole[len(self._spelled(tokens[:count], whole)) :]
        return [*tokens[:count], *_encode(self._tokenizer, rest)] if count else []

    def _agreement(self, tokens: Sequence[int], whole: str) -> int:
        """How many of `tokens` can begin what spells `whole`: all, or up to a special one.

        Behind a special token, text is encoded as it is within the whole.
        """
        low, high = 0, len(tokens) + 1
        middle = len(tokens)
        while high - low > 1:
            if whole.startswith(self._spelled(tokens[:middle], whole)):
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        special = set(self._tokenizer.all_special_ids)
        while 0 < low < len(tokens) and tokens[low - 1] not in special:
            low -= 1
        return low

    def _spelled(self, tokens: Sequence[int], whole: str) -> str:
        """The text of tokens, less an opening that the template does not write."""
        opening = opening_tokens(self._tokenizer)
        written = whole.startswith(spell(self._tokenizer, opening))
        if written or list(tokens[: len(opening)]) != opening:
            return spell(self._tokenizer, tokens)
        return spell(self._tokenizer, tokens[len(opening) :])


#: How a conversation, or a single prompt, is written down for the model.
ChatScript = PlainScript | TemplateScript


def chat_script(
    tokenizer: Any,
    system: str | None,
    raw: bool,
    template_args: Mapping[str, Any] | None = None,
) -> ChatScript:
    """The script of a tokenizer: its chat template, or none under `raw` or where it has none.

    template_args: what the template is given besides the messages, by name, such as
    `enable_thinking`; one that it does not read changes nothing.

    Raises `ConfigError` for a system prompt that the template refuses, for one, or arguments, that
    have no template to go into, and for an argument that is not the caller's to give.
    """
    if not raw and tokenizer.has_chat_template:
        check_template_args(template_args or {})
        return TemplateScript(tokenizer, system, template_args)
    if system is not None:
        raise ConfigError(
            "the model has no chat template to put a system prompt into; leave --system out "
            "and write it into the prompt"
        )
    if template_args:
        reason = "--raw leaves the chat template out" if raw else "the model has no chat template"
        raise ConfigError(
            f"there is no chat template to give {', '.join(map(repr, template_args))} to: {reason}"
        )
    return PlainScript(tokenizer)


def check_template_args(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an argument that is not the caller's to give to a template."""
    for name in arguments:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"a chat template takes arguments by name, got {name!r}")
        if name in _RESERVED:
            raise ConfigError(
                f"the chat template's {name!r} is not an argument to give: it follows from the "
                "conversation; leave it out"
            )


def stop_tokens(tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> frozenset[int]:
    """The tokens that end an answer inside the chat template.

    Those of the model's config, and the special token that the template puts after an answer,
    which some configs leave out.
    """
    ends = frozenset(tokenizer.eos_token_ids)
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
    try:
        whole = str(_render(tokenizer, messages, template_args or {}, add_generation_prompt=False))
    except ConfigError:
        # A template that takes no answer back has nothing to say about its end.
        return ends
    _, found, rest = whole.rpartition(_PROBE)
    after = _encode(tokenizer, rest) if found else []
    special = set(tokenizer.all_special_ids)
    return ends | {int(token) for token in after[:1] if token in special}


def answer_message(answer: str) -> Message:
    """An answer as a chat template takes it.

    Of one that the model wrote in channels (gpt-oss), templates want the thoughts by themselves,
    and refuse the channels' names within the content.
    """
    parts = _CHANNEL.findall(answer)
    if not parts:
        return {"role": "assistant", "content": answer}
    thoughts = "".join(text for channel, text in parts if channel == _THOUGHTS)
    content = "".join(text for channel, text in parts if channel != _THOUGHTS)
    return {"role": "assistant", "content": content, "thinking": thoughts}


def opening_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer itself puts before a text: BOS, or none."""
    bare = _encode(tokenizer, _PROBE)
    full = [int(token) for token in tokenizer.encode(_PROBE, add_special_tokens=True)]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def spell(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones and all spaces included."""
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text and nothing else."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _opened(tokenizer: Any, tokens: list[int]) -> list[int]:
    """The tokens after those that the tokenizer puts before a text, which come once."""
    opening = opening_tokens(tokenizer)
    return tokens if tokens[: len(opening)] == opening else [*opening, *tokens]


def _extended(tokenizer: Any, tokens: list[int], text: str, more: str) -> list[int]:
    """`tokens`, which spell `text`, and those of the text that goes on from there."""
    if not more:
        return tokens
    bare, whole = _encode(tokenizer, text), _encode(tokenizer, text + more)
    # Tokens that reach across the seam would take the end of the text with them.
    rest = whole[len(bare) :] if whole[: len(bare)] == bare else _encode(tokenizer, more)
    return [*tokens, *rest]


def _render(
    tokenizer: Any,
    messages: list[Message],
    arguments: Mapping[str, Any],
    *,
    tokenize: bool = False,
    add_generation_prompt: bool = True,
    hint: str = "",
) -> Any:
    """What the template makes of the messages: text, or tokens. Raises `ConfigError`."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **arguments
        )
    # A template is a program of its own, and may fail as any program does.
    except Exception as error:
        system = messages[0]["role"] == "system"
        usual = "leave --system out, or use --raw" if system else "use --raw"
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"the model's chat template refuses this: {kind}{error}; {hint or usual}"
        ) from error
