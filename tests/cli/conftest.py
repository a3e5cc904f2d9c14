from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_kvcache.commands.app import app
from tests.support.tiny_models_on_disk import write_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with sliding (window 8) and full layers and 512 positions."""
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    return write_model(tmp_path_factory.mktemp("chatty"), chat=True)


@pytest.fixture(scope="session")
def flat_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of full-attention layers only."""
    changes = {"layer_types": ["full_attention"] * 4}
    return write_model(tmp_path_factory.mktemp("flat"), changes=changes)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run the command line in this process: `run("generate", "hi")` answers typer's Result."""

    def invoke(*arguments: str | Path, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return invoke
