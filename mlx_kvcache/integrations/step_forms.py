"""What a compiled step takes for granted, and the objects of a cache list that it moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import CacheList

from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.cache.step import PolicySteps
from mlx_kvcache.cache.traced import PolicyForm, TracedLayer

#: What stands for an array among the attributes of a recurrent state.
ARRAY = "array"


class StateForm(NamedTuple):
    """A recurrent entry of the cache list: what its arrays are put back into.

    attributes: path and value of each, with `ARRAY` for an array.
    """

    kind: type
    attributes: tuple[tuple[str, Any], ...]

    def with_arrays(self, arrays: Sequence[mx.array]) -> dict[str, Any]:
        """The attributes of an entry with these arrays."""
        held = iter(arrays)
        leaves = [(path, next(held) if leaf is ARRAY else leaf) for path, leaf in self.attributes]
        attributes: dict[str, Any] = tree_unflatten(leaves)
        return attributes

    def entry(self, arrays: Sequence[mx.array]) -> Any:
        """An entry with these arrays."""
        made: Any = object.__new__(self.kind)
        vars(made).update(self.with_arrays(arrays))
        return made


class StepForm(NamedTuple):
    """What a trace takes for granted; all else is an array.

    policies: distinct. layers: which of them each layer follows. states: recurrent entries.
    entries: the cache list, as the index of a layer, -1 less that of a state, or a tuple of these
    for the children of a `CacheList`.
    """

    tokens: int
    policies: tuple[PolicyForm, ...]
    layers: tuple[int, ...]
    states: tuple[StateForm, ...]
    entries: tuple[Any, ...]

    def cache(self, layers: Sequence[TracedLayer], states: Sequence[Any]) -> list[Any]:
        """A cache list of this form."""
        return [_rebuilt(entry, layers, states) for entry in self.entries]


class Members(NamedTuple):
    """The objects of a cache list that holds all layers of one sequence of ours.

    listed: the list when they were found. policies: what distinct layers share, and whether they
    heed the model's window. The others as in `StepForm`.
    """

    listed: list[Any]
    layers: tuple[SequenceLayer, ...]
    states: tuple[Any, ...]
    policies: tuple[tuple[PolicySteps, bool], ...]
    order: tuple[int, ...]
    entries: tuple[Any, ...]

    @classmethod
    def of(cls, cache: Sequence[Any]) -> Members | None:
        """The members of a list, which a `PromptCache` keeps; None for a list of others."""
        kept: Members | None = getattr(cache, "members", None)
        if kept is not None and kept.listed == cache:
            return kept
        found = cls._found(cache)
        if hasattr(cache, "members"):
            cache.members = found
        return found

    @classmethod
    def _found(cls, cache: Sequence[Any]) -> Members | None:
        layers: list[SequenceLayer] = []
        states: list[Any] = []
        entries = tuple([_noted(entry, layers, states) for entry in cache])
        if not layers or len(layers) != len(layers[0].sequence.layers):
            return None
        if not all(hasattr(state, "__dict__") for state in states):
            return None
        sequence = layers[0].sequence
        policies: dict[tuple[PolicySteps, bool], int] = {}
        order = []
        for index, layer in enumerate(layers):
            if layer.sequence is not sequence or layer.index != index:
                return None
            order.append(
                policies.setdefault((layer.steps, layer.heeds_model_window), len(policies))
            )
        return cls(
            list(cache), tuple(layers), tuple(states), tuple(policies), tuple(order), entries
        )

    def form(self, batch: int, tokens: int) -> tuple[StepForm, list[list[mx.array]]] | None:
        """The form of a step, and the arrays of the states; None for one that is not compiled."""
        first = self.layers[0]
        sequence, position = first.sequence, first.offset
        if (
            not 0 < position == sequence.length
            or position + tokens > sequence.room
            or sequence.unwritten
            or first.batch != batch
        ):
            return None
        policies = []
        for steps, heeds in self.policies:
            rows = steps.traceable_rows(position, tokens)
            if not rows:
                return None
            policies.append(PolicyForm(steps.window, steps.ring_size, rows, heeds))
        states, arrays = described(self.states)
        return StepForm(tokens, tuple(policies), self.order, states, self.entries), arrays


def described(states: Sequence[Any]) -> tuple[tuple[StateForm, ...], list[list[mx.array]]]:
    """The forms of recurrent entries, and their arrays."""
    forms, arrays = [], []
    for entry in states:
        leaves: Any = tree_flatten(vars(entry))
        arrays.append([leaf for _, leaf in leaves if isinstance(leaf, mx.array)])
        attributes = [
            (path, ARRAY if isinstance(leaf, mx.array) else leaf) for path, leaf in leaves
        ]
        forms.append(StateForm(type(entry), tuple(attributes)))
    return tuple(forms), arrays


def _noted(entry: Any, layers: list[SequenceLayer], states: list[Any]) -> Any:
    """The place of an entry of the cache list, which is added to the layers or the states."""
    if isinstance(entry, SequenceLayer):
        layers.append(entry)
        return len(layers) - 1
    if isinstance(entry, CacheList):
        return tuple([_noted(child, layers, states) for child in entry.caches])
    states.append(entry)
    return -len(states)


def _rebuilt(entry: Any, layers: Sequence[TracedLayer], states: Sequence[Any]) -> Any:
    """What stands at a place that `_noted` has answered."""
    if isinstance(entry, tuple):
        return CacheList(*(_rebuilt(child, layers, states) for child in entry))
    return layers[entry] if entry >= 0 else states[-entry - 1]
