from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.chat.conversation import ChatOptions, Conversation
from mlx_kvcache.commands.app import app
from mlx_kvcache.models import load
from tests.support.tiny_models_on_disk import TEMPLATE, write_chat_model

Loaded = tuple[Any, Any]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`directories(family, template)`: a model's directory, written once."""
    made: dict[tuple[str, str | None], Path] = {}

    def directory(family: str = "llama", template: str | None = TEMPLATE) -> Path:
        if (family, template) not in made:
            path = tmp_path_factory.mktemp(family)
            made[family, template] = write_chat_model(path, family, template)
        return made[family, template]

    return directory


@pytest.fixture(scope="session")
def loaded(directories: Callable[..., Path]) -> Callable[..., Loaded]:
    """`loaded(family, template)`: model and tokenizer, loaded once."""
    made: dict[tuple[str, str | None], Loaded] = {}

    def model(family: str = "llama", template: str | None = TEMPLATE) -> Loaded:
        if (family, template) not in made:
            made[family, template] = load(directories(family, template))
        return made[family, template]

    return model


@pytest.fixture
def begin(loaded: Callable[..., Loaded]) -> Callable[..., Conversation]:
    """`begin(family, template, capacity=..., spare=..., **options)`: a new conversation."""

    def conversation(
        family: str = "llama",
        template: str | None = TEMPLATE,
        *,
        capacity: int | None = None,
        spare: int = 64,
        **options: Any,
    ) -> Conversation:
        model, tokenizer = loaded(family, template)
        cache = make_prompt_cache(model, capacity, spare=spare, initial_capacity=4)
        options = {"max_tokens": 6, **options}
        return Conversation(model, tokenizer, cache, ChatOptions(**options))

    return conversation


@pytest.fixture
def chat() -> Callable[..., Any]:
    """Run `mlx-kvcache chat` in this process over some lines: typer's Result."""

    def run(directory: Path, lines: str | bytes, *arguments: str) -> Any:
        command = ["chat", "--model", str(directory), *arguments]
        return CliRunner().invoke(app, command, input=lines)

    return run
