"""`mlx-kvcache op`: the attention op on given or random tensors, against a plain recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_kvcache.commands.console import write_json
from mlx_kvcache.commands.op_options import (
    DEFAULT_STEPS,
    DEFAULT_TOLERANCE,
    KV_CACHE_FORM,
    Drawing,
    KVCacheText,
    parse_steps,
)
from mlx_kvcache.commands.options import parse_windows
from mlx_kvcache.facts.config import DEFAULT_SPARE

if TYPE_CHECKING:
    from mlx_kvcache.commands.op_request import OpRequest

#: The status when an answer is further from the recomputation than the tolerance.
ABOVE_TOLERANCE = 1


def op(
    kv_cache: Annotated[
        str, typer.Option(metavar=KV_CACHE_FORM, help="The cache to run on.", show_default=False)
    ],
    windows: Annotated[
        str,
        typer.Option(metavar="N,...", help="One for all layers, or one each; 0 = flat."),
    ] = "0",
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="T,...",
            help=f"Tokens of each step. [default: {DEFAULT_STEPS}; with --tensors one step]",
            show_default=False,
        ),
    ] = None,
    spare: Annotated[int, typer.Option(min=1, help="Spare rows of a ring.")] = DEFAULT_SPARE,
    query_heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="A multiple of the heads. [default: the heads]", show_default=False
        ),
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(min=1, help="[default: dim]", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences that advance together. [default: 1]", show_default=False
        ),
    ] = None,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="Give each head an attention sink.")
    ] = False,
    softcap: Annotated[
        float | None, typer.Option(help="Cap the scores.", show_default=False)
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="[default: 1 / sqrt(dim)]", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the random tensors. [default: 0]", show_default=False),
    ] = None,
    tensors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="queries, keys and values [B, H, N, D], or [L, B, H, N, D]; sinks [Hq].",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Largest error allowed; times the largest value if that is above 1."),
    ] = DEFAULT_TOLERANCE,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Run update_and_attend step by step and compare each answer with a plain recomputation.

    Everything is computed in float32. The recomputation keeps no cache: it attends to all keys and
    values so far, rounded to the storage dtype as the cache does, so one tolerance serves all
    dtypes; what the rounding alone changes is shown beside it. Ends with status 1 when an error is
    above the tolerance.

    Examples:

    ```sh
    mlx-kvcache op --kv-cache 128,2,4,64
    mlx-kvcache op --kv-cache 128,2,1,64,bfloat16 --windows 8,0 --spare 4 --steps 20,1,1,3
    mlx-kvcache op --kv-cache 64,1,2,32 --query-heads 8 --value-dim 16 --sinks --softcap 30 --json
    ```
    """
    from mlx_kvcache.commands.op_request import OpRequest, Tensors

    cache = KVCacheText.parse(kv_cache)
    wanted = None if steps is None else parse_steps(steps)
    drawing = Drawing(query_heads, value_dim, batch, sinks, seed)
    if tensors is None:
        wanted = wanted or parse_steps(DEFAULT_STEPS)
        given = Tensors.drawn(cache, sum(wanted), drawing)
    else:
        drawing.refuse_with(tensors)
        given = Tensors.from_file(tensors, cache.layers)
    request = OpRequest.make(
        cache,
        given,
        steps=wanted or (given.positions,),
        windows=parse_windows(windows),
        spare=spare,
        scale=scale,
        softcap=softcap,
        tolerance=tolerance,
    )
    if not _report(request, as_json):
        raise typer.Exit(ABOVE_TOLERANCE)


def _report(request: OpRequest, as_json: bool) -> bool:
    """Run and show; answer whether every error is within the tolerance."""
    from mlx_kvcache.commands.op_run import facts, result_line, run, verdict_line

    results = []
    for result in run(request):
        results.append(result)
        if not as_json:
            typer.echo(result_line(result))
    if as_json:
        write_json(facts(request, results))
    else:
        typer.echo(verdict_line(results))
    return all(result.passed for result in results)
