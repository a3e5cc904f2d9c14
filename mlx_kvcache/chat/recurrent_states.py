"""The states of a model's recurrent layers, remembered by position so that they can go back.

A recurrent state (SSM, linear attention, convolution) holds no row for each position, so it
cannot be rewound. It can be put back to a position at which it was recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from mlx_kvcache.integrations.mlx_lm import PromptCache

#: How many of the positions that `keep` names stay recorded; each costs one state of the model.
MAX_KEPT = 16


class RecurrentStates:
    """What the entries of a prompt cache that are no cache layers of ours held, by position.

    A record copies no array: MLX arrays are values, which a later step replaces. It holds them
    alive, though, so only few positions are kept. A model without such entries records nothing
    and can go back to any position.
    """

    def __init__(self, cache: PromptCache) -> None:
        self._entries = cache.recurrent
        self._records: dict[int, list[dict[str, Any]]] = {}
        self.record(0)

    @property
    def exist(self) -> bool:
        """Whether the model has any such state."""
        return bool(self._entries)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions that are recorded, ascending."""
        return tuple(sorted(self._records))

    @property
    def nbytes(self) -> int:
        """Bytes of the states as they are now; a record of another position takes as many."""
        return sum(int(entry.nbytes) for entry in self._entries)

    def record(self, position: int) -> None:
        """Remember the states, which hold `position` tokens now."""
        if self._entries:
            # An item assignment changes an mlx array in place, so the record has its own objects.
            self._records[position] = copy.deepcopy([vars(entry) for entry in self._entries])

    def restore(self, position: int) -> None:
        """Put the states back to a recorded position. Raises `KeyError` for another."""
        if self._entries:
            values = copy.deepcopy(self._records[position])
            for entry, attributes in zip(self._entries, values, strict=True):
                vars(entry).update(attributes)
            self._records = {
                place: record for place, record in self._records.items() if place <= position
            }

    def keep(self, positions: Collection[int], newest: int) -> None:
        """Forget all records but those of 0, of `positions` (the last few) and from `newest` on."""
        if len(self._records) > 2:
            wanted = {0, *sorted(positions)[-MAX_KEPT:]}
            self._records = {
                place: record
                for place, record in self._records.items()
                if place in wanted or place >= newest
            }

    def reaches(self, position: int) -> bool:
        """Whether the states can be put back to `position`."""
        return not self._entries or position in self._records

    def fork(self, cache: PromptCache) -> RecurrentStates:
        """The same records for a copy of the prompt cache."""
        twin = RecurrentStates(cache)
        twin._records = dict(self._records)
        return twin
