"""A drawing of a cell store, for debugging."""

from __future__ import annotations

import string
from collections.abc import Sequence

FREE = "."
SHARED = "+"
#: The digit or letter of an id; ids beyond these are drawn as OTHER.
NAMES = string.digits + string.ascii_letters
OTHER = "*"


def draw_cells(owners: Sequence[int], used: int, capacity: int, width: int) -> str:
    """One character a cell, `width` cells a line, after a line that counts and explains them.

    `owners` are the bit masks of the cells below the end of the used ones.
    """
    lines = [
        f"{used} of {capacity} cells used, the last one below {len(owners)}; "
        f"{FREE} free, 0-9a-zA-Z the id of one owner ({OTHER} an id above {len(NAMES) - 1}), "
        f"{SHARED} several owners"
    ]
    digits = len(str(max(0, len(owners) - 1)))
    for start in range(0, len(owners), width):
        drawn = "".join(_symbol(mask) for mask in owners[start : start + width])
        lines.append(f"{start:>{digits}} {drawn}")
    return "\n".join(lines)


def _symbol(mask: int) -> str:
    if not mask:
        return FREE
    if mask & (mask - 1):
        return SHARED
    identity = mask.bit_length() - 1
    return NAMES[identity] if identity < len(NAMES) else OTHER
