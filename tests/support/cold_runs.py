"""What a model says on mlx-lm's own caches, fed from nothing: the oracle of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_kvcache.chat.conversation import Conversation

TOLERANCE = 1e-4
#: How much a changed token must move the logits for the comparison to mean anything.
SENSITIVITY = 1e-2


def say(conversation: Conversation, text: str) -> tuple[int, ...]:
    """Take a turn to its end; its answer's tokens."""
    count = len(conversation.turns)
    for _ in conversation.ask(text):
        pass
    assert len(conversation.turns) >= count
    return conversation.turns[-1].answer


def greedy(model: Any, prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
    """The next `count` tokens, or as many as there are up to one of `ends`."""
    answer = []
    for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count):
        answer.append(int(token))
        if int(token) in ends:
            break
    return answer


def cold_logits(model: Any, tokens: Sequence[int]) -> mx.array:
    return model(mx.array([list(tokens)]), cache=make_prompt_cache(model))[0, -1]


def warm_logits(conversation: Conversation, token: int) -> mx.array:
    """The logits after one more token, on a copy of the conversation's cache."""
    cached = conversation.cached
    cache = cached.cache.fork()
    return cached.model(mx.array([[token]]), cache=cache)[0, -1]


def distance(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max())


def fed(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each step that the conversation's model is run over from now on."""
    counted: list[int] = []
    model = conversation.cached.model

    class Counting:
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            counted.append(tokens.shape[1])
            return model(tokens, cache=cache)

    monkeypatch.setattr(conversation.cached, "model", Counting())
    return counted


def check_cache(conversation: Conversation, probe: int = 7) -> None:
    """The cache holds exactly the conversation's tokens: it goes on as a cold run over them."""
    cached = conversation.cached
    tokens = conversation.tokens
    assert conversation.history.pending == []
    assert cached.length == cached.sequence.length == len(tokens)
    assert {layer.offset for layer in cached.sequence.layers} == {len(tokens)}
    if len(tokens) + 1 > conversation.capacity:
        return
    warm = warm_logits(conversation, probe)
    assert distance(warm, cold_logits(cached.model, [*tokens, probe])) < TOLERANCE
    if tokens:
        changed = [*tokens[:-1], 3 + (tokens[-1] + 1) % 90, probe]
        assert distance(warm, cold_logits(cached.model, changed)) > SENSITIVITY
        shorter = [*tokens[:-1], probe]
        assert distance(warm, cold_logits(cached.model, shorter)) > SENSITIVITY


def check_answer(conversation: Conversation) -> None:
    """The newest answer is the cold run's over exactly the tokens before it."""
    turn = conversation.turns[-1]
    before = conversation.tokens[: turn.answer_start]
    assert turn.answer
    assert conversation.tokens[turn.answer_start :] == list(turn.answer)
    model = conversation.cached.model
    assert list(turn.answer) == greedy(model, before, len(turn.answer))
