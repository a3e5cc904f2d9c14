"""Whether two ways to run a model answer alike, as far as rounding goes."""

from __future__ import annotations

import mlx.core as mx

#: How far logits may differ, relative to their spread: rounding is 1e-6 of it in float32, about a
#: hundredth in half precisions.
LOGITS_AGREE = 1e-3
HALF_LOGITS_AGREE = 0.2


def logits_agree(got: mx.array, expected: mx.array) -> bool:
    """Whether logits of one shape are the same; evaluates both."""
    limit = LOGITS_AGREE if got.dtype == mx.float32 else HALF_LOGITS_AGREE
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    # Some models give tokens that are none a logit of -inf.
    known = mx.isfinite(expected)
    error = mx.where(known, mx.square(got - expected), 0).sum()
    level = mx.where(known, expected, 0).sum() / known.sum()
    size = mx.where(known, mx.square(expected - level), 0).sum()
    return bool((error <= limit**2 * size).item())
