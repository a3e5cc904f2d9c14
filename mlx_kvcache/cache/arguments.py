"""What an attention call may be given: arrays, options and positions that fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kvcache.errors import AttentionError, PositionError, UpdateDtypeError, UpdateShapeError
from mlx_kvcache.facts.checks import shortened

_LARGEST = float(np.finfo(np.float32).max)

#: The position of the first token of a step, or the positions of all of them.
Positions = int | Sequence[int] | Sequence[Sequence[int]] | mx.array | np.ndarray[Any, Any]


class AttendOptions(NamedTuple):
    """How queries are attended, whatever the rows are.

    sinks [Hq]: one more score for each head, which takes weight and adds no value. softcap c:
    scores become c * tanh(score / c). out_dtype: None for the dtype of the queries.
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float | None = None
    out_dtype: mx.Dtype | None = None


def check_arrays(queries: mx.array, keys: mx.array, values: mx.array) -> None:
    """Raise unless the three can be attended together, whatever the number of keys."""
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        if not isinstance(array, mx.array):
            raise UpdateDtypeError(f"{name} must be an mx.array, got {type(array).__name__}")
        if not mx.issubdtype(array.dtype, mx.floating):
            raise UpdateDtypeError(
                f"attention takes floating-point {name}, got {array.dtype}; cast them first"
            )
        if array.ndim != 4:
            raise UpdateShapeError(f"{name} must have four axes [B, H, T, D], got {array.shape}")
    batch, query_heads, tokens, dim = queries.shape
    heads = keys.shape[1]
    if keys.shape[0] != batch or keys.shape[3] != dim:
        _refuse(queries, keys, values, "queries and keys differ in the batch or in the head dim")
    if values.shape[:3] != keys.shape[:3]:
        _refuse(queries, keys, values, "keys and values differ in the batch, heads or tokens")
    if min(batch, query_heads, tokens, heads) < 1 or query_heads % heads:
        _refuse(queries, keys, values, "the query heads must be a multiple of the KV heads")


def check_options(query_heads: int, options: AttendOptions) -> None:
    """Raise `AttentionError` or `UpdateDtypeError` unless the options fit `query_heads`."""
    scale, sinks, softcap, out_dtype = options
    # A plain float is by far the usual case, and isinstance with Real is slow.
    if type(scale) is not float and not _is_real(scale):
        raise AttentionError(f"scale must be a number that the host knows, got {scale!r}")
    if not _is_finite(scale):
        raise AttentionError(f"scale must be finite, got {shortened(scale)}")
    if softcap is not None and not (_is_real(softcap) and _is_finite(softcap) and softcap > 0):
        raise AttentionError(
            f"softcap must be a positive number, got {softcap!r}; None does not cap the scores"
        )
    if out_dtype is not None and not (
        isinstance(out_dtype, mx.Dtype) and mx.issubdtype(out_dtype, mx.floating)
    ):
        raise UpdateDtypeError(f"out_dtype must be a floating-point mlx dtype, got {out_dtype!r}")
    if sinks is None:
        return
    if not isinstance(sinks, mx.array) or not mx.issubdtype(sinks.dtype, mx.floating):
        kind = getattr(sinks, "dtype", type(sinks).__name__)
        raise UpdateDtypeError(f"sinks must be a floating-point mx.array, got {kind}")
    if sinks.shape != (query_heads,):
        raise AttentionError(
            f"sinks must be [{query_heads}], one for each query head, got {list(sinks.shape)}"
        )


def step_start(positions: Positions, tokens: int) -> int:
    """The position of the first of `tokens` tokens that stand at `positions`.

    positions: that very integer, or an integer array or list [T] or [T, 1], one run upwards.
    Raises `PositionError` for anything else.
    """
    if type(positions) is int:
        start = positions
    else:
        numbers = positions_of(positions, tokens)
        start = numbers[0]
        if tokens > 1 and numbers != list(range(start, start + tokens)):
            raise PositionError(
                "the positions of a step must be one run, each one more than the last, but they "
                f"are {_excerpt(numbers)}; this cache holds one sequence, without gaps or branches"
            )
    if start < 0:
        raise PositionError(f"positions count from 0, got {start}")
    return start


def positions_of(positions: Positions, tokens: int) -> list[int]:
    """The position of each of `tokens` tokens: of those from a start on, or of [T] or [T, 1].

    Raises `PositionError` for anything else.
    """
    # Not remembered by the object's identity: an mx.array keeps it through `positions += 1`.
    array = _on_host(positions)
    if array.dtype.kind not in "iu":
        raise PositionError(
            f"positions must be integers, got {array.dtype}; give the start of the step as an "
            "int, or one integer for each token"
        )
    if array.ndim == 0:
        return list(range(int(array), int(array) + tokens))
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
    numbers: list[int] = array.reshape(-1).tolist()
    return numbers


def _on_host(positions: Positions) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(positions)
    except (TypeError, ValueError, OverflowError) as error:
        raise PositionError(
            f"positions must be an int, or an integer array or list [T] or [T, 1]: {error}"
        ) from error


def _excerpt(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}, ...]" if len(numbers) > 8 else f"[{shown}]"


def _is_finite(value: float) -> bool:
    """Whether a number is finite as a float32, in which scores are computed."""
    try:
        return abs(float(value)) <= _LARGEST
    except OverflowError:
        return False


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refuse(queries: mx.array, keys: mx.array, values: mx.array, reason: str) -> None:
    raise UpdateShapeError(
        f"attention takes queries [B, Hq, T, D], keys [B, H, S, D] and values [B, H, S, Dv], got "
        f"{list(queries.shape)}, {list(keys.shape)} and {list(values.shape)}: {reason}"
    )
