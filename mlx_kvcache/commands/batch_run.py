"""Runs the prompts of `batch` on an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_kvcache import models
from mlx_kvcache.chat.generation import prompt_tokens
from mlx_kvcache.commands.batch_input import Prompt
from mlx_kvcache.commands.context import position_limit
from mlx_kvcache.commands.options import RunOptions
from mlx_kvcache.engine import Engine, Request, Session
from mlx_kvcache.errors import CapacityError, ConfigError
from mlx_kvcache.facts.config import DEFAULT_SPARE, MAX_CAPACITY
from mlx_kvcache.integrations.sampling import Sampling


@dataclass(frozen=True)
class BatchChoice:
    """How the prompts run together."""

    sessions: int
    kind: str
    step_tokens: int
    share_prefix: bool


@dataclass
class Batch:
    """Prompts that were submitted, in input order, and the engine that answers them."""

    engine: Engine
    tokenizer: Any
    prompts: Sequence[Prompt]
    requests: list[Request]
    token_counts: list[int]
    prefix: Session | None
    prefix_tokens: int

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
            "text": self._text(request),
            "finish_reason": request.finish_reason,
            "error": None if request.error is None else str(request.error),
            "prompt_tokens": self.token_counts[index],
            "generated_tokens": len(request.tokens),
            "token_ids": request.tokens,
            "queue_seconds": request.queue_seconds,
            "first_token_seconds": _since(request, request.first_token),
            "total_seconds": _since(request, request.ended),
        }

    def _text(self, request: Request) -> str:
        detokenizer = self.tokenizer.detokenizer
        detokenizer.reset()
        for token in request.tokens:
            if token not in request.stop:
                detokenizer.add_token(token)
        detokenizer.finalize()
        text: str = detokenizer.text
        return text


def prepare(prompts: Sequence[Prompt], options: RunOptions, choice: BatchChoice) -> Batch:
    """Load the model and submit all prompts; what cannot fit is refused with its line.

    Raises what `models.load` and `Engine` raise, `ConfigError` or `CapacityError`.
    """
    directory = models.resolve(options.model)
    limit = position_limit(models.read_config(directory)) or MAX_CAPACITY
    model, tokenizer = models.load(directory, dtype=options.dtype)
    tokens = [_tokens(tokenizer, prompt, options.raw) for prompt in prompts]
    needs = [
        len(ids) + prompt.options.max_tokens for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    prefix = _common(tokens) if choice.share_prefix else []
    capacity = options.capacity
    if capacity is None:
        largest = sorted(needs, reverse=True)[: choice.sessions]
        capacity = min(sum(largest) + len(prefix), MAX_CAPACITY)
    own = capacity - (len(prefix) if choice.kind == "batched" else 0)
    _check_room(prompts, tokens, min(limit, own), options)
    engine = Engine(
        model,
        capacity,
        choice.kind,
        max_active=choice.sessions,
        step_tokens=choice.step_tokens,
        max_context=min(limit, capacity),
        kv_dtype=options.kv_dtype,
        spare=options.spare or DEFAULT_SPARE,
        windows=options.windows,
    )
    session = None
    if prefix:
        session = engine.open()
        session.submit(prefix, max_tokens=0)
    stop = sorted(tokenizer.eos_token_ids)
    requests = [
        engine.submit(
            ids[len(prefix) :],
            max_tokens=prompt.options.max_tokens,
            sampling=Sampling(prompt.options.temp, prompt.options.top_p, prompt.options.seed),
            stop=stop,
            parent=session,
        )
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    counts = [len(ids) for ids in tokens]
    return Batch(engine, tokenizer, prompts, requests, counts, session, len(prefix))


def _tokens(tokenizer: Any, prompt: Prompt, raw: bool) -> list[int]:
    try:
        return prompt_tokens(tokenizer, prompt.text, prompt.options.system, raw)
    except ConfigError as error:
        raise ConfigError(f"line {prompt.line}: {error}") from error


def _common(tokens: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with; each keeps at least one token of its own."""
    if len(tokens) == 1:
        return []
    shortest, first, last = min(map(len, tokens)), min(tokens), max(tokens)
    # What the first and the last in the order of lists have in common, all between them have.
    common = 0
    while common < shortest - 1 and first[common] == last[common]:
        common += 1
    return first[:common]


def _check_room(
    prompts: Sequence[Prompt], tokens: Sequence[list[int]], room: int, options: RunOptions
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
