"""A copy of a model whose weights are the arguments of a trace."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from mlx_kvcache.integrations.tracing import weight_places


class _Turned(Linear):
    """A linear layer whose weight was transposed before: in a graph that is one node less."""

    def __call__(self, x: mx.array) -> mx.array:
        if "bias" in self:
            return mx.addmm(self["bias"], x, self["weight"])
        product: mx.array = x @ self["weight"]
        return product


class Twins:
    """The weights of a model as they are now, and copies of it that take them as arguments.

    A trace puts its arrays in the place of a model's weights, which nobody else may see: so each
    thread has a copy. turned: whether linear layers take their weights transposed.
    """

    def __init__(self, model: Module, turned: bool) -> None:
        self._turned = turned
        self._places = weight_places(model)
        self._local = threading.local()
        self._model = model

    @property
    def are_current(self) -> bool:
        """Whether the model still has the modules that it had."""
        now, then = weight_places(self._model), self._places
        return len(now) == len(then) and all(
            one[0] is other[0] and one[1] == other[1] for one, other in zip(now, then, strict=True)
        )

    def weights(self) -> list[mx.array]:
        """The weights of the model, in the order in which a copy takes them."""
        weights = [
            place[name].T if self._turned and _is_turned(place, name) else place[name]
            for place, name in self._places
        ]
        # They are kept, and an unevaluated array would belong to this thread.
        mx.eval(weights)
        return weights

    @contextmanager
    def model(self, weights: Sequence[mx.array]) -> Iterator[Module]:
        """This thread's copy, with these weights while the body runs."""
        local: Any = self._local
        if not hasattr(local, "model"):
            twin = copy.deepcopy(self._model)
            if self._turned:
                for _, module in twin.named_modules():  # type: ignore[no-untyped-call]
                    if type(module) is Linear:
                        module.__class__ = _Turned
            local.places, local.model = weight_places(twin), twin
        try:
            for (place, name), array in zip(local.places, weights, strict=True):
                place[name] = array
            yield local.model
        finally:
            # Weights that the model has let go would be held, or those of a trace.
            for place, name in local.places:
                place[name] = None


def _is_turned(place: Any, name: Any) -> bool:
    return type(place) is Linear and name == "weight"
