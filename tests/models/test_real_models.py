"""The two demo models themselves: they speak, and their tokenizers are the file's own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import generate

import mlx_kvcache.models as models

pytestmark = pytest.mark.models

# SHA-256 of the JSON list of the tokens, taken from the GGUF files with the gguf package.
TOKEN_LISTS = {
    "smollm2": "6dae5ca0dff9573b1c5a7d6ab32c3498f4af9d3e3dc582f234af80ffc8c2543d",
    "gemma3-270m": "ae721e107249f709c4542cb8867e02c0ebd4552268d36bb66ded71589a5c3a59",
}

SENTENCES = (
    "The capital of France is Paris.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Où est la bibliothèque ? Ça va très bien, merci !",
    "¿Dónde está el baño? ¡Mañana!",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "いろはにほへと ちりぬるを 日本語のテキスト",
    "我能吞下玻璃而不伤身体。",
    "다람쥐 헌 쳇바퀴에 타고파",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ",
    "דג סקרן שט בים מאוכזב",
    "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "🙂 🤷🏽‍♀️ 👨‍👩‍👧‍👦 🇫🇷 ❤️",
    "∀x: ⌈x⌉ ≥ x ∧ ¬∃y → ∞ ½ € ™",
    "def f(x):\n    return x ** 2  # square\n",
    '{"a": [1, 2.5, null], "b": "\\n"}',
    "<html>\n\t<body class='x'>&amp;</body>\n</html>",
    "12345 67,890.12 2024-01-02T03:04:05Z 0xDEADBEEF",
    "I'll say we're they've don't WON'T",
    "MixedCASE camelCase snake_case kebab-case",
    "a",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "zqxjkvbw zzzz",
    "²½ ١٢٣ ⅷ ①",
)
FRAMES = ("{}", "  {}", "{}\n\n", "\t{}\n  ")

PARAGRAPH = (
    "The city of Paris lies on the Seine in the north of France. In 1889 the Eiffel Tower was "
    "built there for a world fair. It was meant to stand for twenty years, but it is still there, "
    "and millions of people visit it every year."
)


@pytest.fixture(scope="module", params=list(TOKEN_LISTS))
def demo(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    return (request.param, *models.load(request.param, dtype="float32"))


def loss(model: Any, ids: list[int]) -> float:
    """Mean nats a token."""
    logits = model(mx.array([ids[:-1]]))[0]
    return float(nn.losses.cross_entropy(logits, mx.array(ids[1:]), reduction="mean").item())


def test_they_continue_sensibly(demo: tuple[str, Any, Any]) -> None:
    name, model, tokenizer = demo
    expected = {
        "smollm2": (("The capital of France is", "Paris"), ("The opposite of hot is", "cold")),
        "gemma3-270m": (
            ("The Eiffel Tower is in the city of", "Paris"),
            ("Monday, Tuesday, Wednesday,", "Thursday, Friday"),
        ),
    }
    for prompt, word in expected[name]:
        assert word in generate(model, tokenizer, prompt, max_tokens=8)


def test_text_is_likely_and_shuffled_text_is_not(demo: tuple[str, Any, Any]) -> None:
    _, model, tokenizer = demo
    ids = tokenizer.encode(PARAGRAPH)
    shuffled = [ids[0], *np.random.default_rng(0).permutation(ids[1:]).tolist()]
    assert loss(model, ids) < 3.2
    assert loss(model, shuffled) > 6.5


def test_the_vocabulary_is_the_files(demo: tuple[str, Any, Any]) -> None:
    name, _, tokenizer = demo
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    assert [index for _, index in vocabulary] == list(range(len(vocabulary)))
    # Gemma's file writes tokens of several spaces as spaces.
    tokens = [
        " " * len(t) if len(t) > 1 and set(t) == {"▁"} and name != "smollm2" else t
        for t, _ in vocabulary
    ]
    assert hashlib.sha256(json.dumps(tokens).encode()).hexdigest() == TOKEN_LISTS[name]


@pytest.mark.parametrize("frame", FRAMES)
def test_texts_come_back_from_their_ids(demo: tuple[str, Any, Any], frame: str) -> None:
    _, model, tokenizer = demo
    rows = model.model.embed_tokens.weight.shape[0]
    seen = set()
    for sentence in SENTENCES:
        text = frame.format(sentence)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert max(ids) < rows
        seen.add(tuple(ids))
        stream = tokenizer.detokenizer
        for index in ids:
            stream.add_token(index)
        stream.finalize()
        assert stream.text.strip() == text.strip()
    assert len(seen) == len(SENTENCES)


def test_smollm2_tokens_and_chat() -> None:
    model, tokenizer = models.load("smollm2")
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode(" 2024") == [216, 34, 32, 34, 36]
    assert tokenizer.encode("<|im_start|>hi<|im_end|>") == [1, 6004, 2]
    assert tokenizer.eos_token_ids == {2}
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=24)


def test_gemma_tokens_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    directory = models.resolve("gemma3-270m")
    assert "Gemma Terms of Use found at ai.google.dev/gemma/terms; their text is kept in " in (
        notice := capsys.readouterr().err
    )
    assert str(directory / "GEMMA_TERMS.html") in notice
    assert b"Gemma Terms of Use" in (directory / "GEMMA_TERMS.html").read_bytes()
    config = models.read_config("gemma3-270m")
    assert config["sliding_window"] == 512
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert len(config["layer_types"]) == 18
    _, tokenizer = models.load("gemma3-270m")
    assert tokenizer.encode("Hello world") == [2, 9259, 1902]
    assert tokenizer.encode("<start_of_turn>\n\n\n") == [2, 105, 109]
    assert tokenizer.eos_token_ids == {1}
