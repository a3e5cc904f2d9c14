"""Runs the prompts of `batch` on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from mlx_kvcache.chat.text import ChatScript, chat_script, write_messages
from mlx_kvcache.commands.batch_input import BatchOptions, Prompt, Refusal
from mlx_kvcache.commands.batch_output import result_line
from mlx_kvcache.commands.loading import Loaded, load
from mlx_kvcache.control.factory import BATCHED
from mlx_kvcache.control.history import common_prefix
from mlx_kvcache.engine import Engine, Request, Session
from mlx_kvcache.errors import CapacityError, KVCacheError
from mlx_kvcache.facts.config import MAX_CAPACITY

_Script = Callable[[str | None, bool], ChatScript]


@dataclass(frozen=True)
class Written:
    """A prompt in the model's tokens, and the tokens that end its answer."""

    prompt: Prompt
    tokens: list[int]
    stop: frozenset[int]

    @property
    def need(self) -> int:
        """Positions of the prompt and the whole answer."""
        return len(self.tokens) + self.prompt.options.max_tokens


@dataclass
class Batch:
    """Prompts that were submitted, in input order, and the engine that answers them."""

    engine: Engine
    tokenizer: Any
    prefix: Session | None
    requests: dict[Request, Written] = field(default_factory=dict)

    def submit(self, written: Written, shared: int) -> None:
        """Ask for an answer. shared: how many tokens the prefix has. Raises as `Engine.submit`."""
        options = written.prompt.options
        request = self.engine.submit(
            written.tokens[shared:],
            max_tokens=options.max_tokens,
            sampling=options.sampling,
            stop=sorted(written.stop),
            parent=self.prefix,
        )
        self.requests[request] = written

    def run(self) -> Iterator[list[tuple[Request, bool]]]:
        """Answer all prompts: for each step, whose tokens were made, and whether they ended it."""
        while not self.engine.is_idle:
            yield [
                (event.request, event.finish_reason is not None)
                for event in self.engine.step()
                if event.request in self.requests
            ]

    def finished(self) -> Iterator[Request]:
        """The requests that have ended, in input order."""
        return (request for request in self.requests if request.finish_reason is not None)

    def line(self, request: Request) -> int:
        """The number of the line that asked for this."""
        return self.requests[request].prompt.line

    def result(self, request: Request) -> str:
        """The result of one prompt, as it is written."""
        written = self.requests[request]
        prompt = written.prompt
        facts = {
            "line": prompt.line,
            "id": prompt.label,
            "text": self._text(request),
            "finish_reason": request.finish_reason,
            "error": None if request.error is None else str(request.error),
            "prompt_tokens": len(written.tokens),
            "generated_tokens": len(request.tokens),
            "token_ids": request.tokens,
            "input_hash": prompt.hash,
            "queue_seconds": request.queue_seconds,
            "first_token_seconds": _since(request, request.first_token),
            "total_seconds": _since(request, request.ended),
        }
        return result_line(facts)

    def _text(self, request: Request) -> str:
        detokenizer = self.tokenizer.detokenizer
        detokenizer.reset()
        for token in request.tokens:
            if token not in request.stop:
                detokenizer.add_token(token)
        detokenizer.finalize()
        text: str = detokenizer.text
        return text


def prepare(prompts: Sequence[Prompt], options: BatchOptions) -> tuple[Batch, list[Refusal]]:
    """Load the model and submit the prompts; those that can never be answered are refused.

    Raises what `load` and `Engine` raise.
    """
    loaded = load(options)
    refusals: list[Refusal] = []
    written = _write(prompts, loaded, refusals)
    limit = loaded.limit or MAX_CAPACITY
    whole = min(limit, options.capacity or MAX_CAPACITY)
    written = _fitting(written, whole, options, refusals)
    prefix = _common([each.tokens for each in written]) if options.share_prefix else []
    kind, capacity = options.cache.value, options.capacity
    if capacity is None:
        largest = sorted((each.need for each in written), reverse=True)[: options.sessions]
        capacity = min(sum(largest) + len(prefix), MAX_CAPACITY) or 1
    own = capacity - (len(prefix) if kind == BATCHED else 0)
    written = _fitting(written, min(limit, own), options, refusals)
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
    batch = Batch(engine, loaded.tokenizer, session)
    for each in written:
        try:
            batch.submit(each, len(prefix))
        except KVCacheError as error:
            refusals.append(Refusal(each.prompt.line, error, each.prompt.label))
    return batch, refusals


def _write(prompts: Sequence[Prompt], loaded: Loaded, refusals: list[Refusal]) -> list[Written]:
    """The prompts in tokens; those that the tokenizer or its template refuses join the refusals."""
    script: _Script = cache(partial(chat_script, loaded.tokenizer))
    written = []
    for prompt in prompts:
        try:
            chosen = script(prompt.options.system, prompt.options.raw)
            if isinstance(prompt.content, str):
                tokens = chosen.write([], [], prompt.content)
            else:
                tokens = write_messages(loaded.tokenizer, prompt.content)
            written.append(Written(prompt, tokens, chosen.stop_tokens))
        except KVCacheError as error:
            refusals.append(Refusal(prompt.line, error, prompt.label))
    return written


def _common(tokens: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with; each keeps at least one token of its own."""
    if len(tokens) <= 1:
        return []
    # What the first and the last in the order of lists have in common, all between them have.
    common = common_prefix(min(tokens), max(tokens))
    return tokens[0][: min(common, min(map(len, tokens)) - 1)]


def _fitting(
    written: Sequence[Written], room: int, options: BatchOptions, refusals: list[Refusal]
) -> list[Written]:
    """Those that fit into a session of so many positions; the others join the refusals."""
    source = "--capacity" if options.capacity is not None else "the model's context length"
    fitting = []
    for each in written:
        if each.need <= room:
            fitting.append(each)
            continue
        prompt = each.prompt
        error = CapacityError(
            f"{len(each.tokens)} prompt tokens and {prompt.options.max_tokens} new ones need "
            f"{each.need} positions, but one session has at most {room} ({source}); lower "
            "max_tokens, shorten the prompt, or raise --capacity"
        )
        refusals.append(Refusal(prompt.line, error, prompt.label))
    return fitting


def _since(request: Request, moment: float | None) -> float | None:
    return None if moment is None else moment - request.submitted
