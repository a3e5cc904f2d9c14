"""`mlx-kvcache op`: the attention op on given or random tensors, against a plain recomputation."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_kvcache.commands.console import write_json
from mlx_kvcache.commands.op_options import OpOptions
from mlx_kvcache.commands.options import with_flags

#: The status when an answer is further from the recomputation than the tolerance.
ABOVE_TOLERANCE = 1


@with_flags(OpOptions)
def op(
    options: OpOptions,
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
    mlx-kvcache op --kv-cache 64,2,4,32 --windows 8 --spare 4 --steps 20,1,1,1
    mlx-kvcache op --kv-cache 128,2,1,64,bfloat16 --windows 8,0 --spare 4 --steps 20,1,1,3
    mlx-kvcache op --kv-cache 64,1,2,32 --query-heads 8 --value-dim 16 --sinks --softcap 30 --json
    ```
    """
    from mlx_kvcache.commands.op_request import OpRequest
    from mlx_kvcache.commands.op_run import facts, result_line, run, verdict_line

    request = OpRequest.of(options)
    results = []
    for result in run(request):
        results.append(result)
        if not as_json:
            typer.echo(result_line(result))
    if as_json:
        write_json(facts(request, results))
    else:
        typer.echo(verdict_line(results))
    if not all(result.passed for result in results):
        raise typer.Exit(ABOVE_TOLERANCE)
