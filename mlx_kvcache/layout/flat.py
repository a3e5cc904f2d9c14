"""The flat layer: keeps every row, row = position."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_kvcache.layout.runs import Run, StepPlan


@dataclass(frozen=True)
class FlatLayout:
    """Rows of a layer whose queries see every earlier position."""

    def plan(self, position: int, count: int) -> StepPlan:
        """Write the new rows behind the old ones, read all of them."""
        end = position + count
        return StepPlan(position, count, (Run(position, count),), 0, (Run(0, end),), 0, False)

    def rewind_floor(self, high_water: int) -> int:  # noqa: ARG002 (one signature for layouts)
        """Nothing is ever overwritten, so every position is reachable."""
        return 0
