"""From the kinds and row shapes of a model's layers to its geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_types import KindsOf, MemoryKind
from mlx_kvcache.facts.hf.row_shapes import RowShape, ShapeOf
from mlx_kvcache.facts.layers import LayerGeometry, LayerMap, ModelLayer

#: What a family caches, as a function of its config.
Rule = Callable[[Fields], LayerMap]


@dataclass
class LayerStack:
    """Builds a geometry layer by layer, bottom up."""

    layers: list[LayerGeometry] = field(default_factory=list)
    model_layers: list[ModelLayer] = field(default_factory=list)

    def attend(self, *layers: LayerGeometry, recurrent: bool = False) -> None:
        """A model layer that owns these cache layers, in this order."""
        first = len(self.layers)
        self.layers.extend(layers)
        owned = tuple(range(first, len(self.layers)))
        self.model_layers.append(ModelLayer(owned, recurrent=recurrent))

    def recur(self) -> None:
        """A model layer that has only a state of its own."""
        self.model_layers.append(ModelLayer(recurrent=True))

    def skip(self) -> None:
        """A model layer that remembers nothing."""
        self.model_layers.append(ModelLayer())

    def share(self, owner: int) -> None:
        """A model layer that reads what the cache layer `owner` holds."""
        self.layers[owner] = replace(self.layers[owner], shared=True)
        self.model_layers.append(ModelLayer((owner,), shares=True))

    def build(self) -> LayerMap:
        return LayerMap(tuple(self.layers), tuple(self.model_layers))


def one_cache_a_layer(kinds: KindsOf, shape: ShapeOf) -> Rule:
    """The usual rule: each layer owns one cache at most, and all rows have one shape."""

    def rule(fields: Fields) -> LayerMap:
        return stack_kinds(fields, kinds(fields), shape(fields))

    return rule


def stack_kinds(
    fields: Fields,
    kinds: Sequence[MemoryKind],
    shapes: RowShape | Sequence[RowShape],
    shared: int = 0,
    window: int | None = None,
) -> LayerMap:
    """One model layer for each kind, with one row shape for all or one for each.

    The last `shared` layers own nothing and read the last earlier owner of their kind. Raises
    `GeometryError` when there is none. window: that of rings, where not `sliding_window` says it.
    """
    owned = len(kinds) - shared
    if shared and owned < 1:
        raise fields.error(
            "num_kv_shared_layers", shared, f"less than the number of layers ({len(kinds)})"
        )
    if isinstance(shapes, RowShape):
        shapes = [shapes] * len(kinds)
    stack = LayerStack()
    last_owner: dict[MemoryKind, int] = {}
    for index, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        if index >= owned:
            if kind not in last_owner:
                raise GeometryError(
                    f"layer {index} of {fields.family} shares the keys and values of an earlier "
                    f"{kind} layer, but none of the first {owned} layers is one; correct "
                    f"'num_kv_shared_layers' ({shared}) or 'layer_types' in the config.json"
                )
            stack.share(last_owner[kind])
        elif kind == "recurrent":
            stack.recur()
        elif kind == "none":
            stack.skip()
        else:
            last_owner[kind] = len(stack.layers)
            flat = kind == "flat"
            stack.attend(shape.flat() if flat else shape.ring(window or _window(fields, kind)))
    return stack.build()


def _window(fields: Fields, kind: MemoryKind) -> int:
    name = "sliding_window" if kind == "ring" else "attention_chunk_size"
    if fields.raw(name) is None:
        raise fields.error(name, None, f"a positive integer, since there are {kind} layers")
    return fields.integer(name)
