"""Integers only: which rows a step writes, which it may read, how far back one can go.

Nothing here imports MLX or NumPy.
"""

from mlx_kvcache.layout.flat import FlatLayout
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.runs import Run, StepPlan, grown_rows, wrap
from mlx_kvcache.layout.sequence import SequenceLayout

__all__ = [
    "FlatLayout",
    "RingLayout",
    "Run",
    "SequenceLayout",
    "StepPlan",
    "grown_rows",
    "wrap",
]
