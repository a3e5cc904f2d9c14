"""Integers only: which rows a step writes, which it may read, how far back one can go.

Nothing here imports MLX or NumPy.
"""

from mlx_kvcache.layout.batched import BatchedLayout
from mlx_kvcache.layout.cells import CellLayout
from mlx_kvcache.layout.flat import FlatLayout
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.runs import Run, StepPlan, grown_rows, wrap
from mlx_kvcache.layout.sequence import SequenceLayout
from mlx_kvcache.layout.steps import DeclaredStep, StepSpan, spans_of_tokens

__all__ = [
    "BatchedLayout",
    "CellLayout",
    "DeclaredStep",
    "FlatLayout",
    "RingLayout",
    "Run",
    "SequenceLayout",
    "StepPlan",
    "StepSpan",
    "grown_rows",
    "spans_of_tokens",
    "wrap",
]
