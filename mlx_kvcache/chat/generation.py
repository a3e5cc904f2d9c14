"""One answer of a model on our cache: prompt to tokens, room for the answer, tokens, times.

The model's forward passes, the sampling and the detokenizer are mlx-lm's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_kvcache.errors import CapacityError, ConfigError
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY, DEFAULT_SPARE
from mlx_kvcache.integrations.mlx_lm import PromptCache, make_prompt_cache
from mlx_kvcache.integrations.sampling import Sampling

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CacheChoice:
    """What the user chose of the cache; None leaves the package's default.

    `capacity_source` says in messages where the capacity comes from.
    """

    capacity: int | None = None
    capacity_source: str = ""
    kv_dtype: str | None = None
    initial_capacity: int | None = None
    spare: int | None = None
    windows: Sequence[int] | None = None


def prompt_tokens(tokenizer: Any, prompt: str, system: str | None, raw: bool) -> list[int]:
    """The token ids of a prompt, inside the chat template where the tokenizer has one.

    `raw` leaves the template out. Raises `ConfigError` when there is no template for a system
    prompt, when the template refuses, or when nothing is left of the prompt.
    """
    if raw or not tokenizer.has_chat_template:
        if system is not None:
            raise ConfigError(
                "the model has no chat template to put a system prompt into; leave --system out "
                "and write it into the prompt"
            )
        bos = tokenizer.bos_token
        special = bos is None or not prompt.startswith(bos)
        tokens = tokenizer.encode(prompt, add_special_tokens=special)
    else:
        tokens = _templated(tokenizer, prompt, system)
    if not tokens:
        raise ConfigError("the prompt has no token of this model; give some other text")
    return [int(token) for token in tokens]


def _templated(tokenizer: Any, prompt: str, system: str | None) -> Sequence[int]:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        ids: Sequence[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except TemplateError as error:
        hint = "leave --system out, or use --raw" if system is not None else "use --raw"
        raise ConfigError(f"the model's chat template refuses this: {error}; {hint}") from error
    return ids


def check_room(prompt_count: int, max_tokens: int, choice: CacheChoice) -> None:
    """Raise `CapacityError` unless the prompt and the whole answer fit into the capacity."""
    total = prompt_count + max_tokens
    if choice.capacity is not None and total > choice.capacity:
        room = choice.capacity - prompt_count
        less = f"lower --max-tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise CapacityError(
            f"{prompt_count} prompt tokens and {max_tokens} new ones (--max-tokens) need "
            f"{total} positions, but the capacity is {choice.capacity}{choice.capacity_source}; "
            f"{less}, or raise --capacity to {total}"
        )


def chosen_cache(model: Module, choice: CacheChoice) -> PromptCache:
    """An empty cache as chosen.

    Raises `GeometryError` or `ConfigError` where the choice does not fit the model.
    """
    initial, spare = choice.initial_capacity, choice.spare
    return make_prompt_cache(
        model,
        choice.capacity,
        initial_capacity=DEFAULT_INITIAL_CAPACITY if initial is None else initial,
        kv_dtype=choice.kv_dtype,
        spare=DEFAULT_SPARE if spare is None else spare,
        windows=choice.windows,
    )


def make_cache(
    model: Module, choice: CacheChoice, prompt_count: int, max_tokens: int
) -> PromptCache:
    """The cache of one answer, reserved at once where that is known to pay.

    Raises `GeometryError` or `ConfigError` where the choice does not fit the model.
    """
    cache = chosen_cache(model, choice)
    # Growth by doubling holds up to twice the rows it needs. An answer no longer than its prompt
    # stays within that, so reserving both saves every copy and costs no memory. A longer one
    # often ends early, and its rows would have been allocated for nothing. Whoever sets where
    # growth begins wants it to grow from there.
    if choice.initial_capacity is None and max_tokens <= prompt_count:
        cache.sequence.reserve(prompt_count + max_tokens)
    return cache


@dataclass
class Generation:
    """A run of mlx-lm's generation on a cache, and what is known of it so far.

    `pieces` runs it. When that is broken off, what was made until then stands in the fields.

    text: what the pieces add up to. token_ids: the tokens produced, the one that ended the answer
        included. finish_reason: "stop", "length", or None while it is not finished.
    first_token_seconds, seconds: wall-clock time from the start to the first and the newest token.
    """

    model: Module
    tokenizer: Any
    prompt: Sequence[int]
    cache: PromptCache
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    prefill_step: int = 2048
    on_progress: Progress | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None

    def pieces(self) -> Iterator[str]:
        """The answer as it is made, in pieces of text (some are empty)."""
        from mlx_lm.generate import stream_generate
        from mlx_lm.sample_utils import make_sampler

        if self.sampling.seed is not None:
            mx.random.seed(self.sampling.seed)
        start = time.perf_counter()
        for response in stream_generate(
            self.model,
            self.tokenizer,
            mx.array(list(self.prompt)),
            max_tokens=self.max_tokens,
            sampler=make_sampler(self.sampling.temp, self.sampling.top_p),
            prompt_cache=self.cache,
            prefill_step_size=self.prefill_step,
            prompt_progress_callback=self.on_progress,
        ):
            self.seconds = time.perf_counter() - start
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds
            self.token_ids.append(response.token)
            self.text += response.text
            self.finish_reason = response.finish_reason
            yield response.text

    def break_off(self) -> str:
        """The text of tokens that the detokenizer still held back when `pieces` was broken off."""
        whole: str = self.tokenizer.decode(self.token_ids)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        # The first bytes of a character that never became whole.
        rest = rest.rstrip("\ufffd")
        self.text += rest
        return rest

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens over the time to the first token; None before that."""
        if not self.first_token_seconds:
            return None
        return len(self.prompt) / self.first_token_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first over the time they took; None for a single token."""
        if self.seconds is None or self.first_token_seconds is None:
            return None
        decode = self.seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / decode if decode > 0 else None
