"""Whether `mx.compile` is tracing what is done with an array.

A trace is replayed without its Python: a cache that takes part in one would stand still from then
on, and answer wrongly.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import mlx.core as mx

from mlx_kvcache.errors import TracingError


def refuse_traced(array: mx.array) -> None:
    """Raise `TracingError` for an array that has no value, since it only stands for later ones."""
    if _runs_anew(array) and _runs_anew(array) and not _has_value(array):
        raise TracingError(
            "a cache counts its steps in Python, which mx.compile runs for the first of them only; "
            "give the model to mlx_kvcache.compiled in place of mx.compile"
        )


_runs = count()
_ran = 0


def _noted(array: Any) -> Any:
    global _ran
    _ran = next(_runs)
    return array


_identity: Any = mx.compile(_noted, shapeless=True)


def _runs_anew(array: mx.array) -> bool:
    """Whether the Python of a compiled function is run: the first time, and within a trace."""
    before = _ran
    _identity(array)
    return _ran != before


def _has_value(array: mx.array) -> bool:
    """Told by asking for it: so it is where gradients are traced, or compiling is disabled."""
    try:
        mx.eval(array.reshape(-1)[:1])
    except ValueError:
        return False
    return True
