"""What the host pays for the cache in one decode step: building the graph, not running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
from common import NAMES, Spread, alternate, paired
from contenders import Shape, allocated_rows, evaluate, fill, our_cache, their_layers

from mlx_kvcache.facts.config import DEFAULT_SPARE

#: Steps beyond one turn of the ring that still count as "just wrapped".
_MARGIN = 25


@dataclass(frozen=True)
class Phase:
    """A stretch of decode steps, both caches in turns.

    host: microseconds a layer for building a step; whole: microseconds of a step with its
    evaluation; each by contender. ratio: ours / theirs of the host time, step by step.
    growths: (host, whole) microseconds of the steps at which a buffer grew, by contender; here
    host is for the whole step, not a layer.
    """

    name: str
    first: int
    host: tuple[Spread, ...]
    whole: tuple[Spread, ...]
    ratio: Spread
    growths: tuple[list[tuple[float, float]], ...]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "name": self.name,
            "first_position": self.first,
            "host_us_per_layer": _named([spread.as_dict() for spread in self.host]),
            "whole_step_us": _named([spread.as_dict() for spread in self.whole]),
            "host_ratio": self.ratio.as_dict(),
            "growth_steps_us": _named(self.growths),
        }


def flat_phases(shape: Shape, prompt: int, steps: int) -> list[Phase]:
    """Flat layers that hold `prompt` rows and then grow one by one."""
    both = _Both(shape, window=0, prompt=prompt)
    return [both.run("flat", steps)]


def ring_phases(shape: Shape, window: int, steps: int) -> list[Phase]:
    """Layers with a full window: the first turn of the ring after it, then the steady state."""
    both = _Both(shape, window, prompt=window)
    turn = window + DEFAULT_SPARE - 1 + _MARGIN
    return [both.run(f"ring, first {turn} steps", turn), both.run("ring, wrapped", steps)]


class _Both:
    """Our layers and mlx-lm's, filled alike, stepped in turns."""

    def __init__(self, shape: Shape, window: int, prompt: int) -> None:
        self.shape = shape
        self.sides = [our_cache(shape, window).layers, their_layers(shape, window)]
        for layers in self.sides:
            fill(layers, shape, prompt)
        tokens = shape.tokens(), shape.tokens()
        self.growths: list[list[tuple[float, float]]] = [[], []]
        self.steps = [
            _stepper(layers, window, *tokens, self.growths[side])
            for side, layers in enumerate(self.sides)
        ]

    def run(self, name: str, steps: int) -> Phase:
        """The next `steps` steps of both."""
        first = self.sides[0][0].offset
        for growths in self.growths:
            growths.clear()
        times = alternate(steps, self.steps)
        host = [[1e6 * built for built, _ in side] for side in times]
        whole = [[1e6 * took for _, took in side] for side in times]
        return Phase(
            name,
            first,
            tuple(Spread.of(side).scaled(1 / self.shape.layers) for side in host),
            tuple(Spread.of(side) for side in whole),
            paired(*host),
            tuple([(1e6 * built, 1e6 * took) for built, took in side] for side in self.growths),
        )


def _stepper(
    layers: Sequence[Any],
    window: int,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    growths: list[tuple[float, float]],
) -> Callable[[], tuple[float, float]]:
    """One decode step as a model makes it: a mask for the kind, then every layer in turn.

    Rotary embedding reads the offset twice. What the layers answer with is dropped at once, so
    that a step finds the buffers owned by the cache alone, as after a model's attention.
    """
    first = layers[0]
    window_size = window or None

    def step() -> tuple[float, float]:
        rows = allocated_rows(first)
        start = perf_counter()
        mask = first.make_mask(1, return_array=False, window_size=window_size)
        for layer, key, value in zip(layers, keys, values, strict=True):
            _ = layer.offset
            _ = layer.offset
            layer.update_and_fetch(key, value)
        built = perf_counter() - start
        if isinstance(mask, mx.array):
            mx.eval(mask)
        evaluate(layers)
        times = built, perf_counter() - start
        if allocated_rows(first) != rows:
            growths.append(times)
        return times

    return step


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=True))
