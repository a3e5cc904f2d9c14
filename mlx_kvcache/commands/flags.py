"""The flags that `generate` and `chat` share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_kvcache.facts.config import DEFAULT_SPARE

DEFAULT_MODEL = "smollm2"
_DTYPES = "float32, float16 or bfloat16"

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A demo (smollm2, gemma3-270m), a model directory, a .gguf file or a hub id.",
    ),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[
    float, typer.Option(help="Sample from the most likely tokens of this total probability.")
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the sampling; without it each run differs.", show_default=False),
]
SystemPrompt = Annotated[
    str | None, typer.Option(help="System prompt for the chat template.", show_default=False)
]
WeightsDtype = Annotated[
    str | None,
    typer.Option(
        help=f"Dtype of the weights: {_DTYPES}. [default: float32 on a CPU, else as stored]",
        show_default=False,
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        help="The most positions the cache may hold. [default: the model's context length]",
        show_default=False,
    ),
]
KVDtype = Annotated[
    str | None,
    typer.Option(help=f"Dtype of the cache: {_DTYPES}. [default: the model's]", show_default=False),
]
Spare = Annotated[
    int | None,
    typer.Option(
        "--spare",
        "--max-write",
        help="Spare rows of a sliding-window layer; once it has wrapped, it can be rewound by as "
        f"many tokens. [default: {DEFAULT_SPARE}]",
        show_default=False,
    ),
]
Windows = Annotated[
    str | None,
    typer.Option(
        help="Other windows for the cache layers: one for all (32), or one each (32,32,0); "
        "0 keeps everything.",
        show_default=False,
    ),
]
PrefillStep = Annotated[
    int | None,
    typer.Option(
        help="Prompt tokens of one forward pass. [default: 2048 on a GPU, 256 on a CPU]",
        show_default=False,
    ),
]
