"""The drop-in for mlx-lm: a list that its models and generation functions take as `prompt_cache`.

The layer objects speak mlx-lm's cache protocol and share one `MLXSequenceCache`. Layers that keep
no keys and values (SSM, linear attention, convolution) stay mlx-lm's own state objects.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, trim_prompt_cache

from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.cache.sequence import KIND, MLXSequenceCache, SequenceState
from mlx_kvcache.cache.snapshot import Snapshot, check_fits
from mlx_kvcache.errors import GeometryError, RewindError, SnapshotError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import (
    DEFAULT_INITIAL_CAPACITY,
    DEFAULT_SPARE,
    MAX_CAPACITY,
    CacheConfig,
)
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.integrations.tracing import leaves, trace_geometry

#: Between `trim_prompt_cache` and a layer stand `can_trim_prompt_cache`, a generator, and both of
#: these again in a `CacheList`.
_FRAMES_TO_TRIM = 6


class MLXLMLayer(SequenceLayer):
    """A cache layer under mlx-lm's names.

    It has no `__len__` and no `__bool__`, since mlx-lm takes a falsy cache for none, and no
    `bits`, which would route attention to mlx-lm's quantized kernel.
    """

    __slots__ = ()

    def is_trimmable(self) -> bool:
        """Whether what the caller is about to trim can be trimmed.

        mlx-lm puts two questions by this name. Within its `trim_prompt_cache(cache, n)`, which
        trims nothing after a no, and says nothing either, it is about these n tokens: yes, or
        `RewindError`. Everybody else (its prompt cache) may then trim any number: yes only where
        no ring has overwritten anything.
        """
        count = _tokens_to_trim()
        if count is None:
            return self.sequence.rewind_floor == 0
        self.sequence.check_rewind(max(0, self.offset - count))
        return True

    def trim(self, n: int) -> int:
        """Forget the newest `n` tokens of this layer (at most all) and answer how many.

        Raises `RewindError`, and changes nothing, when a ring has overwritten what is needed, or
        for what is no number of tokens.
        """
        if not is_integer(n, 0):
            raise RewindError(f"a number of tokens >= 0 is trimmed, got {shortened(n)}")
        target = max(0, self.offset - n)
        trimmed = self.offset - target
        if trimmed:
            self.step_back(target)
        return trimmed

    def size(self) -> int:
        """Tokens held: all of a flat layer, at most the window of a ring."""
        window = self.steps.window
        return min(self.offset, window) if window else self.offset

    def empty(self) -> bool:
        """Whether no token is held."""
        return self.offset == 0

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        """The arrays that are alive in this layer, and its offset: what mlx-lm evaluates."""
        return self.keys, self.values, self.offset

    @property
    def start_position(self) -> int:
        """Position of the first row that the next update answers with: chunked attention asks."""
        window = self.steps.window
        return max(0, self.offset - window + 1) if window else 0

    def maybe_trim_front(self) -> None:
        """Chunked attention's call to drop old rows; a ring drops them by itself."""


class RewindowedLayer(MLXLMLayer):
    """A layer whose window is not the model's: what it keeps is what is attended."""

    __slots__ = ()
    heeds_model_window = False


def _tokens_to_trim() -> int | None:
    """The n of the `trim_prompt_cache(cache, n)` that is asking, None when none is.

    mlx-lm hands it to no one before it trims, so it is read off the call itself.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_TO_TRIM):
        if frame is None:
            break
        if frame.f_code is trim_prompt_cache.__code__:
            count: int = frame.f_locals["num_tokens"]
            return count
        frame = frame.f_back
    return None


#: The attributes of the recurrent entries, in their order.
RecurrentStates = tuple[dict[str, Any], ...]


class PromptCache(list[Any]):
    """The list that mlx-lm takes, with the cache behind it as `sequence`.

    Entries that are no cache layers of ours are mlx-lm's own state objects.
    """

    def __init__(self, entries: Iterable[Any], sequence: MLXSequenceCache) -> None:
        super().__init__(entries)
        self.sequence = sequence
        # What a compiled model has found in this list.
        self.members: Any = None

    @property
    def recurrent(self) -> list[Any]:
        """The state objects of layers that keep no rows, and so cannot be rewound."""
        return [
            leaf for entry in self for leaf in leaves(entry) if not isinstance(leaf, SequenceLayer)
        ]

    @property
    def length(self) -> int:
        """Positions held."""
        return self.sequence.length

    def rewind(self, position: int) -> None:
        """Forget every position from `position` on, in all layers.

        Raises `RewindError`, and changes nothing, where the layers cannot go back that far:
        recurrent ones cannot at all, other than by `restore`.
        """
        self._check_rewind(position)
        self.sequence.rewind(position)

    def _check_rewind(self, position: int) -> None:
        if not is_integer(position):
            raise RewindError(f"a rewind needs an integer position, got {shortened(position)}")
        if position != self.length and self.recurrent:
            raise RewindError(
                f"cannot rewind from {self.length} to {position}: the model has recurrent layers, "
                "whose state holds no positions; restore a snapshot that was taken there"
            )

    def recurrent_states(self) -> RecurrentStates:
        """What the recurrent entries hold now; evaluates and copies nothing."""
        # An item assignment changes an mlx array in place, so the answer has its own objects.
        return tuple(copy.deepcopy([vars(entry) for entry in self.recurrent]))

    def restore_recurrent(self, states: RecurrentStates) -> None:
        """Put the recurrent entries alone back to what they held; the layers stay.

        Raises `SnapshotError`, and changes nothing, for what is not one state for each of them.
        """
        is_states = isinstance(states, tuple) and all(isinstance(each, dict) for each in states)
        if not is_states or len(states) != len(self.recurrent):
            raise SnapshotError(
                f"{len(self.recurrent)} recurrent states are needed, as recurrent_states() answers "
                f"them, got {shortened(states)}"
            )
        for entry, state in zip(self.recurrent, copy.deepcopy(states), strict=True):
            vars(entry).clear()
            vars(entry).update(state)

    def snapshot(self) -> Snapshot[SequenceState]:
        """What the cache holds now, recurrent states included, to be put back by `restore`.

        Copies nothing until a write. Raises `PositionError` while a step is unfinished.
        """
        mx.eval([entry.state for entry in self.recurrent])
        return replace(self.sequence.snapshot(), states=self.recurrent_states())

    def restore(self, snapshot: Snapshot[SequenceState]) -> None:
        """Hold what this cache, or a fork of it, held when the snapshot was taken.

        Raises `SnapshotError`, and changes nothing, for a snapshot of another cache.
        """
        states, count = getattr(snapshot, "states", ()), len(self.recurrent)
        if len(states) != count:
            raise SnapshotError(
                f"the snapshot holds {len(states)} recurrent states and this cache has "
                f"{count}; take it from a prompt cache of the same model"
            )
        check_fits(snapshot, KIND, self.sequence.geometry, self.sequence.config)
        # Until the layers are restored too, the cache takes no step.
        self.sequence.layout.distrust()
        self.restore_recurrent(states)
        self.sequence.restore(snapshot)

    def fork(self, up_to: int | None = None) -> PromptCache:
        """A cache that holds the same, up to a position, and goes its own way.

        The rows are copied when either of the two is written. Raises `PositionError` while a
        step is unfinished, and what `rewind` raises.
        """
        if up_to is not None:
            self._check_rewind(up_to)
        mx.eval([entry.state for entry in self.recurrent])
        sequence = self.sequence.fork(up_to)
        pairs = zip(self.sequence.layers, sequence.layers, strict=True)
        twins = {id(layer): twin for layer, twin in pairs}
        return PromptCache((_forked(entry, twins) for entry in self), sequence)


def _forked(entry: Any, twins: dict[int, SequenceLayer]) -> Any:
    if isinstance(entry, CacheList):
        return CacheList(*(_forked(child, twins) for child in entry.caches))
    return twins.get(id(entry)) or copy.deepcopy(entry)


def make_prompt_cache(
    model: Module,
    capacity: int | None = None,
    *,
    initial_capacity: int = DEFAULT_INITIAL_CAPACITY,
    kv_dtype: str | None = None,
    spare: int = DEFAULT_SPARE,
    windows: Sequence[int] | None = None,
    max_write: int | None = None,
) -> PromptCache:
    """A prompt cache for an mlx-lm model, to be passed as `prompt_cache=` or `cache=`.

    capacity: the most positions it will hold (None: as many as MLX can index). windows: what is
    kept and attended instead of the model's windows, one for each cache layer or a single one for
    the sliding ones, 0 = everything. The others are the fields of `CacheConfig`.

    What the model caches is read off one lazy forward pass, of which nothing is evaluated; the
    model keeps the answer. Raises `GeometryError` or `ConfigError`.
    """
    traced = trace_geometry(model)
    geometry = traced.geometry
    if windows is not None:
        geometry = _with_windows(geometry, windows)
    config = CacheConfig(
        capacity=MAX_CAPACITY if capacity is None else capacity,
        kv_dtype=kv_dtype,
        initial_capacity=initial_capacity,
        spare=spare,
        max_write=max_write,
        weight_bytes=traced.weight_bytes,
    )
    layer_class = MLXLMLayer if windows is None else RewindowedLayer
    sequence = MLXSequenceCache(geometry, config, layer_class)
    return PromptCache(traced.with_layers(sequence.layers), sequence)


def default_prefill_step() -> int:
    """Prompt tokens of one forward pass.

    mlx-lm's own 2048 on a GPU. On a CPU such a pass takes many seconds and gains nothing over a
    shorter one, after which progress shows and Ctrl-C is heard.
    """
    return 2048 if mx.default_device().type == mx.DeviceType.gpu else 256


def _with_windows(geometry: CacheGeometry, windows: Sequence[int]) -> CacheGeometry:
    """The geometry with other windows, which must agree among layers that share a mask.

    An mlx-lm model asks for one mask for each kind of layer and gives it to all of that kind.
    """
    changed = geometry.with_windows(windows)
    seen: dict[int, tuple[int, int]] = {}
    for index, (old, new) in enumerate(zip(geometry.windows, changed.windows, strict=True)):
        first, window = seen.setdefault(old, (index, new))
        if window != new:
            kind = f"sliding (window {old})" if old else "full"
            raise GeometryError(
                f"the windows give cache layer {first} {window} and cache layer {index} {new}, but "
                f"both are {kind} attention layers, and the model uses one mask for all of a kind; "
                "give every layer of a kind the same window"
            )
    return changed
