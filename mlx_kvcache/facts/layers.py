"""The cache layers of a model, their heads and dims, and who reads which of them.

Immutable facts only. How much memory a run may use, and in which dtype, is `CacheConfig`'s
business and never stands here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.checks import is_integer, shortened

_Item = TypeVar("_Item")

PolicyKind = Literal["flat", "ring"]


def _require_integer(name: str, value: object, minimum: int) -> None:
    if not is_integer(value, minimum):
        raise GeometryError(f"{name} must be an integer >= {minimum}, got {value!r}")


def _require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise GeometryError(f"{name} must be True or False, got {shortened(value)}")


def _as_tuple(name: str, values: object, item: type[_Item]) -> tuple[_Item, ...]:
    made: tuple[Any, ...] | None = None
    # What has no order, or is made of integers by chance, is not meant.
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Set | Mapping):
        # An array without axes says that it can be iterated.
        with contextlib.suppress(TypeError):
            made = tuple(values)
    if made is None:
        raise GeometryError(
            f"{name} must be a sequence of {item.__name__}, got {shortened(values)}"
        )
    for value in made:
        if not isinstance(value, item):
            raise GeometryError(f"{name} must hold {item.__name__} only, got {value!r}")
    return made


@dataclass(frozen=True)
class LayerPolicy:
    """Which rows a layer keeps: all of them (flat), or those of its window (ring).

    `window` counts the newest positions that a query sees, itself included; 0 iff flat.
    """

    kind: PolicyKind
    window: int = 0

    def __post_init__(self) -> None:
        # Not every value can be compared with a string.
        if not isinstance(self.kind, str):
            raise GeometryError(f"a layer policy is 'flat' or 'ring', got {shortened(self.kind)}")
        if self.kind == "flat":
            if not is_integer(self.window, 0, 0):
                raise GeometryError(f"a flat layer has window 0, got {self.window!r}")
        elif self.kind == "ring":
            _require_integer("the window of a ring layer", self.window, 1)
        else:
            raise GeometryError(f"a layer policy is 'flat' or 'ring', got {self.kind!r}")

    @classmethod
    def flat(cls) -> LayerPolicy:
        """The policy that keeps every row."""
        return cls("flat")

    @classmethod
    def ring(cls, window: int) -> LayerPolicy:
        """The policy that keeps what a sliding window of `window` positions can reach."""
        return cls("ring", window)

    @classmethod
    def from_window(cls, window: int) -> LayerPolicy:
        """Flat for 0, a ring for a positive window: the form that metadata and flags use."""
        _require_integer("a window", window, 0)
        return cls.ring(window) if window else cls.flat()


@dataclass(frozen=True)
class LayerGeometry:
    """One cache layer: its policy and the shape of a row.

    `key_dim` and `value_dim` differ for MLA; `value_dim` may be 0 (an indexer that keeps keys
    only). `shared` marks a layer whose rows other model layers read again within a step.
    """

    policy: LayerPolicy
    kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.policy, LayerPolicy):
            raise GeometryError(
                f"a layer's policy is a LayerPolicy, got {self.policy!r}; LayerPolicy.flat() and "
                "LayerPolicy.ring(window) make one"
            )
        _require_integer("kv_heads", self.kv_heads, 1)
        _require_integer("key_dim", self.key_dim, 1)
        _require_integer("value_dim", self.value_dim, 0)
        _require_flag("shared", self.shared)

    @property
    def elements_per_position(self) -> int:
        """Numbers stored for one position: keys and values of all KV heads."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelLayer:
    """One layer of the model and what serves it.

    `caches` are the cache layers it reads (none for a layer without attention, two where a layer
    attends twice); `shares` is True when it reads another layer's rows and writes none;
    `recurrent` when it carries a state of its own (SSM, linear attention, convolution), which
    the inference framework keeps.
    """

    caches: tuple[int, ...] = ()
    shares: bool = False
    recurrent: bool = False

    def __post_init__(self) -> None:
        caches = _as_tuple("the caches of a model layer", self.caches, int)
        object.__setattr__(self, "caches", caches)
        _require_flag("shares", self.shares)
        _require_flag("recurrent", self.recurrent)


@dataclass(frozen=True)
class LayerMap:
    """The cache layers of a model, in the order in which the model indexes them.

    `model_layers` maps each model layer to its cache layers; when it is not given, model layer i
    reads cache layer i. Raises `GeometryError` for an empty or inconsistent description.
    """

    layers: tuple[LayerGeometry, ...]
    model_layers: tuple[ModelLayer, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _as_tuple("layers", self.layers, LayerGeometry))
        object.__setattr__(
            self, "model_layers", _as_tuple("model_layers", self.model_layers, ModelLayer)
        )
        if not self.layers:
            raise GeometryError(
                "a cache geometry needs at least one layer that keeps keys and values; "
                "a purely recurrent model has nothing for this cache to hold"
            )
        if not self.model_layers:
            each = tuple(ModelLayer((index,)) for index in range(len(self.layers)))
            object.__setattr__(self, "model_layers", each)
        for number, layer in enumerate(self.model_layers):
            for index in layer.caches:
                if not is_integer(index, 0, len(self.layers) - 1):
                    raise GeometryError(
                        f"model layer {number} reads cache layer {index}, "
                        f"but there are only {len(self.layers)} cache layers"
                    )

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each cache layer, 0 for a flat one."""
        return tuple(layer.policy.window for layer in self.layers)

    def with_windows(self, windows: Sequence[int]) -> Self:
        """A copy with other windows: one for each cache layer, or a single one for sliding ones.

        0 makes a layer flat. Raises `GeometryError` when the count is neither 1 nor the number of
        cache layers, for a single window but 0 where no layer slides, or a negative one. This
        geometry is left as it is.
        """
        given = _as_tuple("windows", windows, int)
        if len(given) == 1 < len(self.layers):
            if given[0] and not any(self.windows):
                raise GeometryError(
                    "a single window is for the sliding-window layers, and the model has none; "
                    f"give one for each of the {len(self.layers)} cache layers (0 = flat)"
                )
            given = tuple(given[0] if window else 0 for window in self.windows)
        if len(given) != len(self.layers):
            raise GeometryError(
                f"{len(given)} windows were given for {len(self.layers)} cache layers; give one "
                "window for each cache layer, or a single one for the sliding ones (0 = flat)"
            )
        layers = tuple(
            replace(layer, policy=LayerPolicy.from_window(window))
            for layer, window in zip(self.layers, given, strict=True)
        )
        return replace(self, layers=layers)
