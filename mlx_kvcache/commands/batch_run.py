"""Runs the prompts of `batch` on an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from mlx_kvcache.chat.streaming import answer_text
from mlx_kvcache.chat.text import ChatScript, chat_script
from mlx_kvcache.commands.batch_input import BatchOptions, Prompt
from mlx_kvcache.commands.loading import load
from mlx_kvcache.control.factory import BATCHED
from mlx_kvcache.control.history import common_prefix
from mlx_kvcache.engine import Engine, Request, Session
from mlx_kvcache.errors import CapacityError, ConfigError
from mlx_kvcache.facts.config import MAX_CAPACITY


@dataclass
class Batch:
    """Prompts that were submitted, in input order, and the engine that answers them."""

    engine: Engine
    tokenizer: Any
    prompts: Sequence[Prompt]
    requests: list[Request]
    token_counts: list[int]
    prefix: Session | None

    def run(self, on_event: Callable[[Request, bool], None]) -> None:
        """Answer all prompts; `on_event` is told of each token, and whether a request ended."""
        for event in self.engine.run():
            on_event(event.request, event.finish_reason is not None)

    def facts(self, index: int) -> dict[str, Any]:
        """The result of one prompt, for a JSON line."""
        prompt, request = self.prompts[index], self.requests[index]
        return {
            "line": prompt.line,
            "id": prompt.label,
            "text": answer_text(self.tokenizer, request.tokens, request.stop),
            "finish_reason": request.finish_reason,
            "error": None if request.error is None else str(request.error),
            "prompt_tokens": self.token_counts[index],
            "generated_tokens": len(request.tokens),
            "token_ids": request.tokens,
            "queue_seconds": request.queue_seconds,
            "first_token_seconds": _since(request, request.first_token),
            "total_seconds": _since(request, request.ended),
        }


def prepare(prompts: Sequence[Prompt], options: BatchOptions) -> Batch:
    """Load the model and submit all prompts; what cannot fit is refused with its line.

    Raises what `load` and `Engine` raise, `ConfigError` or `CapacityError`.
    """
    loaded = load(options)
    script = cache(partial(chat_script, loaded.tokenizer, raw=options.raw))
    tokens = [_tokens(script, prompt) for prompt in prompts]
    needs = [
        len(ids) + prompt.options.max_tokens for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    prefix = _common(tokens) if options.share_prefix else []
    kind, capacity = options.cache.value, options.capacity
    if capacity is None:
        largest = sorted(needs, reverse=True)[: options.sessions]
        capacity = min(sum(largest) + len(prefix), MAX_CAPACITY)
    limit = loaded.limit or MAX_CAPACITY
    own = capacity - (len(prefix) if kind == BATCHED else 0)
    _check_room(prompts, tokens, min(limit, own), options)
    engine = Engine(
        loaded.model,
        capacity,
        kind,
        max_active=options.sessions,
        step_tokens=options.prefill_budget,
        max_context=min(limit, capacity),
        kv_dtype=options.kv_dtype,
        spare=options.spare,
        windows=options.cache_windows,
    )
    session = None
    if prefix:
        session = engine.open()
        session.submit(prefix, max_tokens=0)
    requests = [
        engine.submit(
            ids[len(prefix) :],
            max_tokens=prompt.options.max_tokens,
            sampling=prompt.options.sampling,
            stop=sorted(script(prompt.options.system).stop_tokens),
            parent=session,
        )
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    counts = [len(ids) for ids in tokens]
    return Batch(engine, loaded.tokenizer, prompts, requests, counts, session)


def _tokens(script: Callable[[str | None], ChatScript], prompt: Prompt) -> list[int]:
    try:
        return script(prompt.options.system).write([], [], prompt.text)
    except ConfigError as error:
        raise ConfigError(f"line {prompt.line}: {error}") from error


def _common(tokens: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with; each keeps at least one token of its own."""
    if len(tokens) == 1:
        return []
    # What the first and the last in the order of lists have in common, all between them have.
    common = common_prefix(min(tokens), max(tokens))
    return tokens[0][: min(common, min(map(len, tokens)) - 1)]


def _check_room(
    prompts: Sequence[Prompt], tokens: Sequence[list[int]], room: int, options: BatchOptions
) -> None:
    for prompt, ids in zip(prompts, tokens, strict=True):
        need = len(ids) + prompt.options.max_tokens
        if need > room:
            source = "--capacity" if options.capacity is not None else "the model's context length"
            raise CapacityError(
                f"line {prompt.line}: {len(ids)} prompt tokens and {prompt.options.max_tokens} new "
                f"ones need {need} positions, but one session has at most {room} ({source}); "
                "lower max_tokens, shorten the prompt, or raise --capacity"
            )


def _since(request: Request, moment: float | None) -> float | None:
    return None if moment is None else moment - request.submitted
