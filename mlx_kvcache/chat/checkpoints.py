"""Places in a sequence to which its sliding-window layers can go back after they wrapped."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kvcache.cache.layer import LayerState
from mlx_kvcache.cache.sequence import MLXSequenceCache, restore_rings


class _Place(NamedTuple):
    high_water: int
    rings: dict[int, LayerState]

    @property
    def nbytes(self) -> int:
        return sum(state.rows.nbytes for state in self.rings.values())


class RingCheckpoints:
    """The rows of the sliding-window layers at some positions of one sequence.

    A layer that attends to everything still has its rows when the sequence goes back, so it is
    left out: a place costs one copy of the rings at the next write, and nothing for a model
    without rings. The rows below a place must stay as they are for as long as it is kept.
    """

    def __init__(self, sequence: MLXSequenceCache) -> None:
        self._sequence = sequence
        self._rings = tuple(
            layer.index for layer in sequence.layers if layer.geometry.policy.window
        )
        self._places: dict[int, _Place] = {}

    @property
    def positions(self) -> tuple[int, ...]:
        """Where one can go back to, lowest first."""
        return tuple(sorted(self._places))

    @property
    def useful(self) -> bool:
        """Whether there are layers that need a place to go back to."""
        return bool(self._rings)

    @property
    def place_nbytes(self) -> int:
        """Bytes that one more place takes."""
        return sum(self._sequence.layers[index].nbytes for index in self._rings)

    @property
    def nbytes(self) -> int:
        """Bytes of all places, those included that the layers still share with the newest."""
        return sum(place.nbytes for place in self._places.values())

    def take(self) -> None:
        """Keep the place at which the sequence stands; no step may be unfinished."""
        if not self._rings:
            return
        sequence = self._sequence
        sequence.layout.check_settled()
        layers = {index: sequence.layers[index] for index in self._rings}
        mx.eval([layer.store.state for layer in layers.values()])
        rings = {index: layer.hold() for index, layer in layers.items()}
        self._places[sequence.length] = _Place(sequence.layout.high_water, rings)

    def go_back(self, position: int) -> None:
        """Put the sequence back to a place that is kept, whatever has happened since."""
        place = self._places[position]
        restore_rings(self._sequence, position, place.high_water, place.rings)

    def keep(self, positions: frozenset[int]) -> None:
        """Let go of all places but these."""
        self._places = {at: place for at, place in self._places.items() if at in positions}

    def copy_for(self, sequence: MLXSequenceCache) -> RingCheckpoints:
        """The same places for a fork of the sequence."""
        twin = RingCheckpoints(sequence)
        twin._places = dict(self._places)
        return twin
