"""`mlx-kvcache inspect`: what cache a model needs, from its config alone."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from mlx_kvcache.commands.console import write_json
from mlx_kvcache.commands.flags import check_dtype, check_integer
from mlx_kvcache.commands.inspect_report import inspect_facts, print_inspection
from mlx_kvcache.commands.inspection import FALLBACK_CONTEXT, inspection

#: The fewest columns of the report.
WIDTH = 80


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
    check_integer("--context", context, 1)
    check_dtype("--kv-dtype", kv_dtype)
    found = inspection(model_or_config, context, kv_dtype)
    if as_json:
        write_json(inspect_facts(found))
    else:
        # In fewer columns names and numbers would be cut; a narrow terminal wraps lines instead.
        console = Console(highlight=False, width=max(WIDTH, Console().width))
        # Written by us, since rich ends the process with a status of its own on a broken pipe.
        with console.capture() as report:
            print_inspection(console, found)
        sys.stdout.write(report.get())
        sys.stdout.flush()
