"""The attention op: a step of a model against a cache that lives outside of it.

A model calls `update_and_attend` once for each of its attention layers and holds no cache of its
own. Which rows are written, which are read and what each query may see is the cache's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kvcache.cache.attend import (
    AttendSpec,
    attend,
    attend_unchecked,
    check_arrays,
    check_options,
)
from mlx_kvcache.control.protocols import AttentionBackend, AttentionLayer
from mlx_kvcache.control.registry import current_cache
from mlx_kvcache.errors import FaceError, PositionError, UpdateShapeError
from mlx_kvcache.facts.geometry import LayerGeometry

__all__ = ["AttendSpec", "attend", "step_start", "update_and_attend"]

#: The position of the first token of a step, or the positions of all of them.
Positions = int | Sequence[int] | Sequence[Sequence[int]] | mx.array | np.ndarray[Any, Any]


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
    target = _layer(cache, layer)
    check_arrays(queries, keys, values)
    check_options(queries.shape[1], scale, out_dtype, sinks, softcap)
    tokens = _checked_tokens(queries, keys, values, target.geometry, layer)
    position = step_start(positions, tokens)
    if position == target.offset:
        spec = AttendSpec.from_mask(target.mask_at(position, tokens))
        keys, values = target.update_and_fetch(keys, values)
    elif target.wrote_last(position, tokens):
        spec = AttendSpec.from_mask(target.mask_at(position, tokens))
        keys, values = _read_again(target, queries.shape[0], layer)
    else:
        raise PositionError(
            f"{tokens} tokens at position {position} do not continue cache layer {layer}, whose "
            f"next position is {target.offset}, nor are they the step it has just written; "
            f"continue at {target.offset}, or rewind the cache first"
        )
    return attend_unchecked(queries, keys, values, spec, scale, out_dtype, sinks, softcap)


def step_start(positions: Positions, tokens: int) -> int:
    """The position of the first of `tokens` tokens that stand at `positions`.

    positions: that very integer, or an integer array or list [T] or [T, 1], one run upwards.
    Raises `PositionError` for anything else.
    """
    if type(positions) is int:
        start = positions
    else:
        start = _run_start(positions, tokens)
    if start < 0:
        raise PositionError(f"positions count from 0, got {start}")
    return start


def _run_start(positions: Positions, tokens: int) -> int:
    # Not remembered by the object's identity: an mx.array keeps it through `positions += 1`.
    array = _on_host(positions)
    if array.dtype.kind not in "iu":
        raise PositionError(
            f"positions must be integers, got {array.dtype}; give the start of the step as an "
            "int, or one integer for each token"
        )
    if array.ndim == 0:
        return int(array)
    if array.ndim == 2 and array.shape[0] == tokens and array.shape[1] > 1:
        raise PositionError(
            f"positions with {array.shape[1]} dims for each token are not supported: rotate the "
            "queries and keys by them in the model, and give their places in the sequence here"
        )
    if array.shape not in ((tokens,), (tokens, 1)):
        raise PositionError(
            f"{tokens} tokens need positions of shape [{tokens}] or [{tokens}, 1], or the "
            f"start of the step as an int, got {list(array.shape)}"
        )
    numbers = array.reshape(-1)
    start = int(numbers[0])
    if tokens > 1 and not np.array_equal(numbers, np.arange(start, start + tokens)):
        raise PositionError(
            "the positions of a step must be one run, each one more than the last, but they are "
            f"{_excerpt(numbers)}; this cache holds one sequence, without gaps or branches"
        )
    return start


def _on_host(positions: Positions) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(positions)
    except (TypeError, ValueError, OverflowError) as error:
        raise PositionError(
            f"positions must be an int, or an integer array or list [T] or [T, 1]: {error}"
        ) from error


def _excerpt(numbers: np.ndarray[Any, Any]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"[{shown}, ...]" if numbers.size > 8 else f"[{shown}]"


def _layer(cache: AttentionBackend | None, layer: int) -> AttentionLayer:
    chosen: Any = current_cache() if cache is None else cache
    if not callable(getattr(chosen, "layer", None)):
        hint = "; of a list from make_prompt_cache, pass its .sequence" if cache is not None else ""
        raise FaceError(
            f"attention needs a cache with layer(index), such as MLXSequenceCache, got "
            f"{type(chosen).__name__}{hint}"
        )
    target: AttentionLayer = chosen.layer(layer)
    return target


def _checked_tokens(
    queries: mx.array, keys: mx.array, values: mx.array, geometry: LayerGeometry, layer: int
) -> int:
    """The tokens of the step. A repeated step is not written, so the layer would not check it."""
    tokens = queries.shape[2]
    heads, key_dim, value_dim = geometry.kv_heads, geometry.key_dim, geometry.value_dim
    if keys.shape[1:] == (heads, tokens, key_dim) and values.shape[3] == value_dim:
        return tokens
    raise UpdateShapeError(
        f"cache layer {layer} takes, with queries {list(queries.shape)}, keys "
        f"[{queries.shape[0]}, {heads}, {tokens}, {key_dim}] and values [{queries.shape[0]}, "
        f"{heads}, {tokens}, {value_dim}], got {list(keys.shape)} and {list(values.shape)}"
    )


def _read_again(target: AttentionLayer, batch: int, layer: int) -> tuple[mx.array, mx.array]:
    keys, values = target.keys_and_values()
    if keys.shape[0] != batch:
        raise UpdateShapeError(
            f"cache layer {layer} has just written this step for a batch of {keys.shape[0]}, "
            f"got queries of a batch of {batch}"
        )
    return keys, values
