"""`mlx-kvcache inspect`: what cache a model needs, from its config alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mlx_kvcache.commands.console import write_json
from mlx_kvcache.commands.context import position_limit
from mlx_kvcache.commands.inspect_report import inspect_facts, print_inspection
from mlx_kvcache.commands.inspection import Inspection, inspection
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import MAX_CAPACITY

#: The context of a model whose config names none.
FALLBACK_CONTEXT = 32768


def inspect(
    model_or_config: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="A config.json, a model directory, a demo, a .gguf file or a hub id.",
            show_default=False,
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens at which to count. [default: the model's context length, "
            f"else {FALLBACK_CONTEXT}]",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="Storage dtype: float32, float16 or bfloat16.")
    ] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show the layers of a model's cache and the bytes that they take. Needs no weights.

    Of a hub model only the config is downloaded.

    Examples:

    ```sh
    mlx-kvcache inspect ./my-model
    mlx-kvcache inspect config.json --context 131072
    mlx-kvcache inspect gemma3-270m --kv-dtype float16
    mlx-kvcache inspect org/model --json | jq .total
    ```
    """
    if context is not None and not 1 <= context <= MAX_CAPACITY:
        raise ConfigError(f"--context must be between 1 and {MAX_CAPACITY}, got {context}")
    config = read_model_config(model_or_config)
    found = _inspect(model_or_config, config, context, kv_dtype)
    if as_json:
        write_json(inspect_facts(found))
    else:
        console = Console(highlight=False)
        # Written by us, since rich ends the process with a status of its own on a broken pipe.
        with console.capture() as report:
            print_inspection(console, found)
        sys.stdout.write(report.get())
        sys.stdout.flush()


def read_model_config(model_or_config: str) -> Mapping[str, Any]:
    """The config of a model by any of its names, or a JSON file of any name.

    Raises `ModelNotFoundError`, `ModelFormatError`, `GeometryError` or `UnsupportedModelError`.
    """
    path = Path(model_or_config).expanduser()
    if path.suffix == ".json" and path.is_file():
        from mlx_kvcache.facts.hf.from_config import read_config

        return read_config(path)
    from mlx_kvcache import models

    return models.read_config(model_or_config)


def _inspect(
    name: str, config: Mapping[str, Any], context: int | None, kv_dtype: str
) -> Inspection:
    limit = position_limit(config)
    tokens = context or limit or FALLBACK_CONTEXT
    # The capacity that `generate` gives the cache, unless the question goes beyond it.
    capacity = max(limit or MAX_CAPACITY, tokens)
    return inspection(name, config, tokens, capacity, kv_dtype)
