"""Attention over rows that the caller holds: what a query may see, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_kvcache.cache.arguments import AttendOptions, check_arrays, check_options
from mlx_kvcache.cache.attend import attend_view
from mlx_kvcache.cache.masks import Mask
from mlx_kvcache.errors import AttentionError, UpdateDtypeError
from mlx_kvcache.facts.checks import shortened
from mlx_kvcache.layout.runs import Run
from mlx_kvcache.store.rows import RowView

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
        if not isinstance(self.kind, str) or self.kind not in ("none", "causal", "explicit"):
            raise AttentionError(
                f"a spec is 'none', 'causal' or 'explicit', got {shortened(self.kind)}"
            )
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
            return cls("none")
        return cls(mask) if isinstance(mask, str) else cls("explicit", mask)  # type: ignore[arg-type]


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
    if not isinstance(spec, AttendSpec):
        raise AttentionError(
            f"what each query sees is an AttendSpec, got {shortened(spec)}; AttendSpec('causal') "
            "is one, and AttendSpec.from_mask makes one of a mask"
        )
    options = AttendOptions(scale, sinks, softcap, out_dtype)
    check_arrays(queries, keys, values)
    check_options(queries.shape[1], options)
    _check_rows(queries, keys, spec)
    view = RowView(keys, values, (Run(0, keys.shape[2]),))
    out = attend_view(queries, view, "causal" if spec.kind == "causal" else spec.mask, options)
    if spec.mask is None:
        return out
    # Without a visible row the softmax has nothing to norm by; backends disagree on the result.
    return mx.where(mx.any(spec.mask, axis=-1, keepdims=True), out, mx.array(0, out.dtype))


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
