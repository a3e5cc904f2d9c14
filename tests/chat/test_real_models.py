"""The demo models in conversation: what a cold run over the same tokens says, after each change."""

from __future__ import annotations

import json

import pytest

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.chat.conversation import ChatOptions, Conversation
from mlx_kvcache.models import load, resolve
from tests.support.cold_runs import check_answer, cold_logits, distance, greedy, say, warm_logits

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def smollm2():
    return load(resolve("smollm2"))


@pytest.fixture(scope="module")
def gemma3():
    return load(resolve("gemma3-270m"))


def check(conversation):
    """The cache goes on as a cold run over the conversation's tokens, whose logits are near 10."""
    tokens, model = conversation.tokens, conversation.cached.model
    assert conversation.history.held == len(tokens)
    warm = warm_logits(conversation, 100)
    assert distance(warm, cold_logits(model, [*tokens, 100])) < 2e-3
    assert distance(warm, cold_logits(model, [*tokens[:-1], 101, 100])) > 0.1


def test_smollm2_talks_undoes_and_forks(smollm2):
    model, tokenizer = smollm2
    conversation = Conversation(
        model, tokenizer, make_prompt_cache(model), ChatOptions(max_tokens=24)
    )
    "".join(conversation.ask("What is the capital of France? Answer in one sentence."))
    (turn,) = conversation.turns
    assert "Paris" in conversation.answer_text(turn)
    assert turn.end == "stop"
    assert tokenizer.convert_ids_to_tokens(turn.answer[-1]) == "<|im_end|>"
    side = conversation.fork()
    for text in ("And of Italy?", "And of Japan?"):
        before = list(conversation.tokens)
        say(conversation, text)
        # The conversation goes on exactly, as the template itself writes it.
        assert conversation.tokens[: len(before)] == before
        check_answer(conversation)
        check(conversation)
    rendered = tokenizer.apply_chat_template(
        [
            message
            for turn in conversation.turns
            for message in (
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": conversation.answer_text(turn)},
            )
        ],
    )
    held = conversation.tokens
    assert rendered[: len(held)] == held
    japan = conversation.undo()
    check(conversation)
    assert say(conversation, "And of Japan?") == japan.answer
    say(side, "And of Spain?")
    check_answer(side)
    check(side)
    check(conversation)
    conversation.drop(5)
    assert conversation.turns[-1].end in ("undone", "stop")
    check(conversation)
    say(conversation, "Thank you.")
    check_answer(conversation)


def test_gemma3_goes_back_within_its_wrapped_rings(gemma3):
    model, tokenizer = gemma3
    text = "Once upon a time there was a river, and the river said to the sea: " * 40
    conversation = Conversation(
        model, tokenizer, make_prompt_cache(model, spare=64), ChatOptions(max_tokens=20)
    )
    say(conversation, text)
    length = len(conversation.tokens)
    assert length > 512 + 64
    first = say(conversation, " Then the sea said")
    assert conversation.cached.sequence.rewind_floor > 0
    conversation.undo()
    assert len(conversation.tokens) == length
    check(conversation)
    assert say(conversation, " Then the sea said") == first
    check_answer(conversation)
    conversation.undo()
    assert say(conversation, " Then the king died") != first
    check_answer(conversation)
    check(conversation)


def test_the_command_talks(chat, smollm2, tmp_path):
    path = tmp_path / "chat.jsonl"
    lines = f"What is the capital of France?\nAnd of Italy?\n/save {path}\n"
    result = chat("smollm2", lines, "--max-tokens", "24")
    assert result.exit_code == 0, result.stderr
    paris, rome = result.stdout.splitlines()
    assert "Paris" in paris
    assert "Rome" in rome
    saved = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["content"] for line in saved[1::2]] == [paris, rome]
    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(saved[:3], add_generation_prompt=True)
    answer = saved[3]["token_ids"]
    assert greedy(model, prompt, len(answer)) == answer
