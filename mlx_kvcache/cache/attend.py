"""Attention over rows that were already read: what a query may see, and the result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import mlx.core as mx

from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.errors import AttentionError, UpdateDtypeError, UpdateShapeError

AttendKind = Literal["none", "causal", "explicit"]


@dataclass(frozen=True, eq=False)
class AttendSpec:
    """Which of the S rows answered each of the T queries of a step sees.

    none: all of them. causal: query i sees the rows up to i + S - T, so that the last query sees
    all. explicit: where the bool `mask` [.., T, S] is True; its leading axes broadcast over the
    batch and the query heads. The mask is there exactly for explicit.
    Raises `AttentionError` or `UpdateDtypeError` for anything else.
    """

    kind: AttendKind
    mask: mx.array | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("none", "causal", "explicit"):
            raise AttentionError(f"a spec is 'none', 'causal' or 'explicit', got {self.kind!r}")
        if self.kind != "explicit":
            if self.mask is not None:
                raise AttentionError(
                    f"a mask was given with kind {self.kind!r}, which would ignore it; "
                    "use AttendSpec('explicit', mask)"
                )
            return
        if self.mask is None:
            raise AttentionError(
                "kind 'explicit' needs a mask: without one every row would be seen; "
                "use AttendSpec('none') if that is meant"
            )
        if not isinstance(self.mask, mx.array) or self.mask.dtype != mx.bool_:
            kind = getattr(self.mask, "dtype", type(self.mask).__name__)
            raise UpdateDtypeError(f"a mask is a bool mx.array (True = attend), got {kind}")
        if not 2 <= self.mask.ndim <= 4:
            raise AttentionError(f"a mask is [.., T, S] of 2 to 4 axes, got {self.mask.shape}")

    @classmethod
    def from_mask(cls, mask: Mask) -> AttendSpec:
        """The spec of a mask as a cache layer answers it: None, "causal" or a bool array."""
        if mask is None:
            return _NONE
        if isinstance(mask, str):
            return _CAUSAL if mask == "causal" else cls(mask)  # type: ignore[arg-type]
        return cls("explicit", mask)


_NONE = AttendSpec("none")
_CAUSAL = AttendSpec("causal")


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    spec: AttendSpec,
    scale: float,
    *,
    out_dtype: mx.Dtype | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """softmax(scale * queries @ keys^T) @ values over what `spec` lets each query see.

    queries [B, Hq, T, D], keys [B, H, S, D], values [B, H, S, Dv], Hq a multiple of H: query head
    h reads KV head h // (Hq / H). Computed in the queries' dtype with a float32 softmax. Answers
    [B, Hq, T, Dv] in `out_dtype`, or in the queries' dtype. A query that sees no row gets zeros.

    sinks [Hq]: one more score for each head, which takes weight and adds no value. softcap c:
    scores become c * tanh(score / c) before the mask.
    Raises `UpdateShapeError`, `UpdateDtypeError` or `AttentionError`.
    """
    check_arrays(queries, keys, values)
    check_options(queries.shape[1], scale, out_dtype, sinks, softcap)
    _check_rows(queries, keys, spec)
    out = attend_unchecked(queries, keys, values, spec, scale, out_dtype, sinks, softcap)
    if spec.mask is None:
        return out
    # Without a visible row the softmax has nothing to norm by; backends disagree on the result.
    return mx.where(mx.any(spec.mask, axis=-1, keepdims=True), out, mx.array(0, out.dtype))


def attend_unchecked(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    spec: AttendSpec,
    scale: float,
    out_dtype: mx.Dtype | None,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """`attend` for arguments that are known to fit, and a spec that leaves no query blind."""
    dtype = queries.dtype
    if keys.dtype != dtype:
        keys = keys.astype(dtype)
    if values.dtype != dtype:
        values = values.astype(dtype)
    if sinks is not None and sinks.dtype != dtype:
        sinks = sinks.astype(dtype)
    if softcap is None:
        mask = "causal" if spec.kind == "causal" else spec.mask
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    else:
        out = _capped(queries, keys, values, spec, scale, sinks, softcap)
    return out if out_dtype is None or out.dtype == out_dtype else out.astype(out_dtype)


def _capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    spec: AttendSpec,
    scale: float,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """Attention with capped scores, which MLX's fused attention does not offer."""
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    grouped = (queries * scale).reshape(batch, heads, query_heads // heads, tokens, dim)
    scores = (grouped @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
    scores = (softcap * mx.tanh(scores / softcap)).reshape(batch, query_heads, tokens, rows)
    mask = spec.mask
    if spec.kind == "causal":
        mask = mx.arange(rows)[None] <= mx.arange(tokens)[:, None] + (rows - tokens)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :rows].astype(queries.dtype)
    weights = weights.reshape(batch, heads, query_heads // heads, tokens, rows)
    return (weights @ values[:, :, None]).reshape(batch, query_heads, tokens, values.shape[3])


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


def check_options(
    query_heads: int,
    scale: float,
    out_dtype: mx.Dtype | None,
    sinks: mx.array | None,
    softcap: float | None,
) -> None:
    """Raise `AttentionError` or `UpdateDtypeError` unless the options fit `query_heads`."""
    # A plain float is by far the usual case, and isinstance with Real is slow.
    if type(scale) is not float and not _is_real(scale):
        raise AttentionError(f"scale must be a number that the host knows, got {scale!r}")
    if not math.isfinite(scale):
        raise AttentionError(f"scale must be finite, got {scale!r}")
    if softcap is not None and not (_is_real(softcap) and 0 < softcap < math.inf):
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


def _check_rows(queries: mx.array, keys: mx.array, spec: AttendSpec) -> None:
    batch, query_heads, tokens, _ = queries.shape
    rows = keys.shape[2]
    if rows < 1 or (spec.kind == "causal" and rows < tokens):
        raise AttentionError(
            f"{tokens} queries cannot attend to {rows} rows with kind {spec.kind!r}: "
            "some query would see nothing"
        )
    if spec.mask is None:
        return
    shape = (1, 1, *spec.mask.shape)[-4:]
    if (
        shape[2:] != (tokens, rows)
        or shape[0] not in (1, batch)
        or shape[1] not in (1, query_heads)
    ):
        raise AttentionError(
            f"a mask for {batch} x {query_heads} heads, {tokens} queries and {rows} rows must "
            f"broadcast to {[batch, query_heads, tokens, rows]}, got {list(spec.mask.shape)}"
        )


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refuse(queries: mx.array, keys: mx.array, values: mx.array, reason: str) -> None:
    raise UpdateShapeError(
        f"attention takes queries [B, Hq, T, D], keys [B, H, S, D] and values [B, H, S, Dv], got "
        f"{list(queries.shape)}, {list(keys.shape)} and {list(values.shape)}: {reason}"
    )
