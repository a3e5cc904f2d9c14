"""What a conversation is made of: its turns, and how it is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_kvcache.integrations.sampling import Sampling

#: Why an answer ends.
ENDS = ("stop", "length", "capacity", "interrupted", "undone")


@dataclass(frozen=True)
class Turn:
    """One turn: what was said, and what the model answered.

    start, answer_start: the positions at which the turn's tokens and its answer's begin.
    answer: the answer's tokens, those it was made to begin with and the one that ended it
        included; empty for a turn whose answer was undone. end: why the answer ends: "stop" (the
        model ended it), "length" (at the most tokens of an answer), "capacity" (the cache was
        full), "interrupted" or "undone" (its tail was).
    """

    user: str
    start: int
    answer_start: int
    answer: tuple[int, ...] = ()
    end: str = "interrupted"


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is held.

    system: the system prompt; raw: leave the chat template out; max_tokens: of one answer, without
    those it was made to begin with; prefill_step: tokens of one forward pass over a turn (None:
    what suits the device); capacity_source: where the capacity comes from, for messages;
    template_args: what the chat template is given besides the messages; prefill: how each answer
    begins; stop_texts: what ends an answer, and is no part of it.
    """

    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    prefill_step: int | None = None
    capacity_source: str = ""
    template_args: Mapping[str, Any] | None = None
    prefill: str = ""
    stop_texts: Sequence[str] = ()
