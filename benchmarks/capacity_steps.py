"""Does a step cost more when more rows are allocated than are visible?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
from common import OURS, THEIRS, Spread, alternate
from contenders import Shape, allocated_rows, evaluate, fill, our_cache, their_layers
from mlx_lm.models.cache import KVCache


@dataclass(frozen=True)
class CapacityResult:
    """Microseconds of a whole step (build and evaluate) of one cache with `rows` allocated.

    `ratio` compares each step with the same contender's step at the fewest rows.
    """

    contender: str
    rows: int
    step: Spread
    ratio: Spread

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "contender": self.contender,
            "rows_allocated": self.rows,
            "step_us": self.step.as_dict(),
            "ratio_to_fewest_rows": self.ratio.as_dict(),
        }


def capacity_results(
    shape: Shape, capacities: Sequence[int], visible: int, steps: int
) -> list[CapacityResult]:
    """Steps of both caches at every number of allocated rows, all in turns.

    Each cache holds `visible` rows, decodes as many again, is put back, and so on: the rows that
    attention reads are the same for all. Ours allocates with `reserve`. mlx-lm's has no such
    call; a prompt of that many rows, trimmed again, leaves it with the same buffer.
    """
    check_capacities(capacities, visible)
    queries, tokens = shape.tokens(), (shape.tokens(), shape.tokens())
    makers = {OURS: _reserved, THEIRS: _trimmed}
    labels = [(name, rows) for name in makers for rows in capacities]
    contenders = []
    for name, rows in labels:
        layers, back = makers[name](shape, rows, visible)
        if allocated_rows(layers[0]) != rows:
            raise RuntimeError(f"{name} allocated {allocated_rows(layers[0])} rows, not {rows}")
        contenders.append(_stepper(layers, queries, *tokens, 2 * visible, back))
    alternate(visible // 4, contenders)  # Warm: kernels, allocator, memory pages.
    times = alternate(steps, contenders)
    whole = {label: [1e6 * took for _, took in side] for label, side in zip(labels, times)}  # noqa: B905
    return [
        CapacityResult(
            name,
            rows,
            Spread.of(whole[name, rows]),
            Spread.of([a / b for a, b in zip(whole[name, rows], whole[name, min(capacities)])]),  # noqa: B905
        )
        for name, rows in labels
    ]


def check_capacities(capacities: Sequence[int], visible: int) -> None:
    """Raise `ValueError` unless both caches can have just these rows, and room for the steps."""
    odd = [rows for rows in capacities if rows % KVCache.step or rows < 2 * visible]
    if odd:
        raise ValueError(
            f"rows to allocate are multiples of {KVCache.step} (mlx-lm's growth) and hold twice "
            f"the {visible} visible ones; {odd[0]} does not fit"
        )


def _reserved(shape: Shape, rows: int, visible: int) -> tuple[Sequence[Any], Callable[[], None]]:
    cache = our_cache(shape, initial_capacity=visible)
    fill(cache.layers, shape, visible)
    cache.reserve(rows)
    evaluate(cache.layers)
    return cache.layers, lambda: cache.rewind(visible)


def _trimmed(shape: Shape, rows: int, visible: int) -> tuple[Sequence[Any], Callable[[], None]]:
    layers = their_layers(shape)
    fill(layers, shape, rows)

    def back() -> None:
        for layer in layers:
            layer.trim(layer.offset - visible)

    back()
    return layers, back


def _stepper(
    layers: Sequence[Any],
    queries: Sequence[mx.array],
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    limit: int,
    back: Callable[[], None],
) -> Callable[[], tuple[float, float]]:
    """One decode step with its attention; at `limit` rows, `back` is called, outside the time."""

    def step() -> tuple[float, float]:
        if layers[0].offset == limit:
            back()
        start = perf_counter()
        mask = layers[0].make_mask(1, return_array=False, window_size=None)
        answers = []
        for layer, query, key, value in zip(layers, queries, keys, values, strict=True):
            read = layer.update_and_fetch(key, value)
            answers.append(mx.fast.scaled_dot_product_attention(query, *read, scale=1.0, mask=mask))
            del read
        built = perf_counter() - start
        mx.eval(answers, [(layer.keys, layer.values) for layer in layers])
        return built, perf_counter() - start

    return step
