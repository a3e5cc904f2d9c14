"""Runs the prompts of `batch` on an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mlx_kvcache.chat.stops import StoppingText, StopText
from mlx_kvcache.chat.streaming import answer_text
from mlx_kvcache.chat.text import ChatScript, PlainScript, chat_script
from mlx_kvcache.commands.batch_input import BatchOptions, Prompt, Refusal
from mlx_kvcache.commands.batch_output import result_line
from mlx_kvcache.commands.loading import Loaded, load
from mlx_kvcache.commands.options import parse_template_args
from mlx_kvcache.control.factory import BATCHED
from mlx_kvcache.control.history import common_prefix
from mlx_kvcache.engine import Engine, Request, Session
from mlx_kvcache.engine.requests import STOP
from mlx_kvcache.errors import CapacityError, ConfigError, KVCacheError
from mlx_kvcache.facts.config import MAX_CAPACITY
from mlx_kvcache.integrations.sampling import Sampling


@dataclass(frozen=True)
class Written:
    """A prompt in the model's tokens, the tokens that end its answer, and how it is chosen."""

    prompt: Prompt
    tokens: list[int]
    stop: frozenset[int]
    sampling: Sampling

    @property
    def need(self) -> int:
        """Positions of the prompt and the whole answer."""
        return len(self.tokens) + self.prompt.options.max_tokens


@dataclass
class Batch:
    """Prompts that were submitted, in input order, and the engine that answers them.

    watches: for the requests that a text may end.
    """

    engine: Engine
    tokenizer: Any
    prefix: Session | None
    requests: dict[Request, Written] = field(default_factory=dict)
    watches: dict[Request, StoppingText] = field(default_factory=dict)

    def submit(self, written: Written, shared: int) -> None:
        """Ask for an answer. shared: how many tokens the prefix has. Raises as `Engine.submit`."""
        options = written.prompt.options
        request = self.engine.submit(
            written.tokens[shared:],
            max_tokens=options.max_tokens,
            sampling=written.sampling,
            stop=sorted(written.stop),
            parent=self.prefix,
        )
        self.requests[request] = written
        if options.stop_texts:
            self.watches[request] = StoppingText(self.tokenizer, written.stop, options.stop_texts)

    def run(self) -> Iterator[list[tuple[Request, bool]]]:
        """Answer all prompts: for each step, whose tokens were made, and whether they ended it."""
        while not self.engine.is_idle:
            events = [event for event in self.engine.step() if event.request in self.requests]
            for request, token, reason in events:
                watch = self.watches.get(request)
                if watch and token is not None and reason is None:
                    watch.add(token)
                    if watch.stopped_by is not None:
                        request.cancel()
            yield [(request, reason is not None) for request, _, reason in events]

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
        stops = StopText(prompt.options.stop_texts)
        text = stops.let_through(answer_text(self.tokenizer, request.tokens, request.stop))
        facts = {
            "line": prompt.line,
            "id": prompt.label,
            "text": text + stops.rest(),
            "finish_reason": STOP if stops.stopped_by is not None else request.finish_reason,
            "stop_text": stops.stopped_by,
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

    @cache
    def script(system: str | None, raw: bool, arguments: str | None) -> ChatScript:
        args = None if arguments is None else parse_template_args(arguments)
        return chat_script(loaded.tokenizer, system, raw, args)

    written = []
    for prompt in prompts:
        options = prompt.options
        prefill = options.prefill_response or ""
        try:
            chosen = script(options.system, options.raw, options.chat_template_args)
            if isinstance(prompt.content, str):
                tokens = chosen.write([], [], prompt.content, prefill)
            elif isinstance(chosen, PlainScript):
                raise ConfigError(
                    "the model has no chat template to put messages into; give a prompt"
                )
            else:
                tokens = chosen.write_messages(prompt.content, prefill)
            sampling = loaded.sampling(options)
            written.append(Written(prompt, tokens, chosen.stop_tokens, sampling))
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
