"""One answer of a model on our cache: tokens, text and times.

The model's forward passes and the sampling are mlx-lm's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_kvcache.chat.logprobs import Logprobs
from mlx_kvcache.chat.stops import StoppingText, before_stop
from mlx_kvcache.chat.streaming import answer_text
from mlx_kvcache.control.history import TokenHistory
from mlx_kvcache.integrations.compiled import Model
from mlx_kvcache.integrations.mlx_lm import PromptCache
from mlx_kvcache.integrations.sampling import RandomState, Sampling, processors_of, sampler_of

Progress = Callable[[int, int], None]


@dataclass
class Generation:
    """A run of mlx-lm's generation on a cache, and what is known of it so far.

    `pieces` runs it. When that is broken off, what was made until then stands in the fields.

    stop, stop_texts: the tokens and the texts that end an answer; `stopped_by` is the text that
        did. text: what the pieces add up to; a stop text is not part of it, but its tokens are
        among `token_ids`. logprobs: where those of each token are collected. finish_reason:
        "stop", "length", or None while it is not finished.
    first_token_seconds, seconds: wall-clock time from the start to the first and the newest token.
    """

    model: Model
    tokenizer: Any
    prompt: Sequence[int]
    cache: PromptCache
    max_tokens: int
    stop: Collection[int]
    sampling: Sampling = field(default_factory=Sampling)
    prefill_step: int = 2048
    on_progress: Progress | None = None
    stop_texts: Sequence[str] = ()
    logprobs: Logprobs | None = None
    text: str = ""
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.cache)
        self._random = RandomState.of(self.sampling.seed)
        self._shown = StoppingText(self.tokenizer, self.stop, self.stop_texts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens produced, the one that ended the answer included."""
        return self.history.tokens[len(self.prompt) :]

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the answer."""
        return self._shown.stopped_by

    def pieces(self) -> Iterator[str]:
        """The answer as it is made, in pieces of text (some are empty)."""
        with self._random.in_use(), closing(self._responses()) as responses:
            for response in responses:
                piece = self._shown.add(response.token)
                self.finish_reason = response.finish_reason
                if self.finish_reason is not None:
                    piece += self._shown.finish()
                if self.stopped_by is not None:
                    self.finish_reason = "stop"
                self.text += piece
                yield piece
                if self.stopped_by is not None:
                    return
                self._random.take()

    def _responses(self) -> Generator[Any, None, None]:
        """mlx-lm's responses, noted down as they come."""
        from mlx_lm.generate import stream_generate

        # mlx-lm stops at what its tokenizer names; the caller's is left as it is.
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.eos_token_ids = set(self.stop)
        start = time.perf_counter()
        for response in stream_generate(
            self.model,
            tokenizer,
            mx.array(self.history.continue_as(self.prompt)),
            max_tokens=self.max_tokens,
            sampler=sampler_of(self.sampling),
            logits_processors=processors_of(self.sampling),
            prompt_cache=self.cache,
            prefill_step_size=self.prefill_step,
            prompt_progress_callback=self.on_progress,
        ):
            self.seconds = time.perf_counter() - start
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds
            self.history.tokens.append(response.token)
            if self.logprobs is not None:
                self.logprobs.add(response.token, response.logprobs)
            yield response

    def break_off(self) -> str:
        """The text that was still held back when `pieces` was broken off."""
        whole = answer_text(self.tokenizer, self.token_ids, self.stop)
        rest = before_stop(whole, self.stop_texts)[len(self.text) :]
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
