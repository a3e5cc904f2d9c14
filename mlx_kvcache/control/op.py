"""The op: a step of a model against a cache that lives outside of it.

A model calls `update_and_attend` once for each of its attention layers and holds no cache of its
own. Which rows are written, which are read and what each query may see is the cache's business.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_kvcache.cache.arguments import Positions
from mlx_kvcache.control.protocols import AttentionBackend
from mlx_kvcache.control.registry import current_cache
from mlx_kvcache.errors import FaceError, PositionError


def update_and_attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: Positions,
    layer: int,
    scale: float,
    *,
    cache: AttentionBackend | None = None,
    out_dtype: mx.Dtype | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Write a step of T tokens to one cache layer and attend to all that its queries may see.

    queries [B, Hq, T, D], keys [B, H, T, D] and values [B, H, T, Dv], rotated already; Hq is a
    multiple of H. Answers [B, Hq, T, Dv] in `out_dtype`, or in the queries' dtype, in which it is
    computed whatever dtype the cache stores.

    positions: where the step starts, or the position of each token, [T] or [T, 1], which must be
    one run. Give the integer where the host knows it: an array is read back, so the first layer
    of a step waits until it is computed (the other layers do not, as long as they pass the same
    array).

    cache: None stands for the active cache of this thread or task: that of the `CacheSession`
    that was entered last.

    The step must continue the layer, or be the step that the layer has just written: a layer of
    the model that shares another's keys and values asks again with equal positions. Then nothing
    is written, `keys` and `values` are not looked at beyond their shape, and the rows that the
    first call read are read again.

    sinks [Hq], softcap: as in `attend`.

    Raises a typed error, and then the cache is as it was: `PositionError`, `CapacityError`,
    `LayerIndexError`, `UpdateShapeError`, `UpdateDtypeError`, `AttentionError`, `FaceError`,
    `NoActiveCacheError`, or `GeometryError` where a layer that is not marked shared is asked again
    after a step larger than its spare rows.
    """
    backend: Any = current_cache() if cache is None else cache
    if not callable(getattr(backend, "attend", None)):
        hint = "; of a list from make_prompt_cache, pass its .sequence" if cache is not None else ""
        raise FaceError(
            f"attention needs a cache with attend(), such as MLXSequenceCache, got "
            f"{type(backend).__name__}{hint}"
        )
    if positions is None:
        raise PositionError(
            "positions must be given: where the step starts, as an int, or one for each token"
        )
    attended: mx.array = backend.attend(
        layer,
        queries,
        keys,
        values,
        scale,
        sinks,
        softcap=softcap,
        out_dtype=out_dtype,
        positions=positions,
    )
    return attended
