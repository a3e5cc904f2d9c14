"""How many bytes of old rows a growing buffer copies on its way to a given length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from common import OURS, THEIRS
from contenders import Shape, allocated_rows, evaluate, our_cache, their_layers


@dataclass(frozen=True)
class GrowthResult:
    """One cache on its way to `tokens` rows, in all of its layers.

    growths: how often the buffers were replaced by larger ones. copied: bytes of old rows copied
    into them. written: bytes of all those larger buffers, the zeros included. held: bytes
    allocated at the end.
    """

    way: str
    contender: str
    tokens: int
    growths: int
    copied: int
    written: int
    held: int

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def growth_results(shape: Shape, tokens: int, prompt: int, chunk: int) -> list[GrowthResult]:
    """Both caches one by one to `tokens`, and after a prompt; ours also with the length known."""
    single = [1] * tokens
    prompt = min(prompt, tokens)
    chunks = [min(chunk, prompt - start) for start in range(0, prompt, chunk)]
    prefilled = chunks + [1] * (tokens - prompt)
    after = f"prompt of {prompt:,} in chunks of {chunk:,}, then one by one"
    reserved = our_cache(shape)
    reserved.reserve(tokens)
    return [
        _grow("one by one", OURS, our_cache(shape).layers, shape, single),
        _grow("one by one", THEIRS, their_layers(shape), shape, single),
        _grow(after, OURS, our_cache(shape).layers, shape, prefilled),
        _grow(after, THEIRS, their_layers(shape), shape, prefilled),
        _grow("one by one, length reserved", OURS, reserved.layers, shape, single),
    ]


def _grow(
    way: str, contender: str, layers: Sequence[Any], shape: Shape, steps: Sequence[int]
) -> GrowthResult:
    growths = copied = written = 0
    new = {count: shape.rows(count) for count in set(steps)}
    with watched_joins() as joins:
        for count in steps:
            rows = allocated_rows(layers[0])
            for layer in layers:
                layer.update_and_fetch(new[count], new[count])
            if rows and allocated_rows(layers[0]) != rows:
                growths += 1
                written += sum(layer.nbytes for layer in layers)
                joins.check(sum(layer.nbytes for layer in layers))
            copied += joins.take()
            evaluate(layers)
    held = sum(layer.nbytes for layer in layers)
    return GrowthResult(way, contender, sum(steps), growths, copied, written, held)


class Joins:
    """The concatenations seen since the last `take`."""

    def __init__(self) -> None:
        self._seen: list[list[int]] = []

    def note(self, parts: Sequence[mx.array]) -> None:
        """Record one concatenation."""
        self._seen.append([part.nbytes for part in parts])

    def check(self, buffers: int) -> None:
        """Raise unless what was joined is exactly the new buffers, `buffers` bytes in all.

        A cache that grew in another way than by joining old rows and new would otherwise be
        counted as if it had copied nothing.
        """
        joined = sum(sum(parts) for parts in self._seen)
        if joined != buffers:
            raise RuntimeError(
                f"a buffer grew to {buffers} bytes, but {joined} bytes were concatenated: "
                "the growth was not seen, so its copies cannot be counted"
            )

    def take(self) -> int:
        """Bytes of the old rows, the first part of each concatenation; then start anew."""
        copied = sum(parts[0] for parts in self._seen)
        self._seen.clear()
        return copied


@contextmanager
def watched_joins() -> Iterator[Joins]:
    """Note every call of `mx.concatenate`, with which both caches grow, while the block runs."""
    joins = Joins()
    concatenate: Callable[..., mx.array] = mx.concatenate

    def noting(arrays: Sequence[mx.array], *args: Any, **kwargs: Any) -> mx.array:
        joins.note(arrays)
        return concatenate(arrays, *args, **kwargs)

    mx.concatenate = noting
    try:
        yield joins
    finally:
        mx.concatenate = concatenate
