"""The rule for a model_type that has no entry of its own: what the standard fields say.

Only a config made of standard fields gets a geometry. A field that speaks of another kind of
memory (a state space, a latent, shared projections) is refused, never taken for plain attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kvcache.errors import UnknownLayerTypeError
from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_stack import stack_kinds
from mlx_kvcache.facts.hf.layer_types import MemoryKind, all_of, by_pattern, listed_kinds
from mlx_kvcache.facts.hf.row_shapes import with_global
from mlx_kvcache.facts.hf.unlisted_fields import bearing_fields, is_encoder
from mlx_kvcache.facts.layers import LayerMap


def unlisted(fields: Fields) -> LayerMap:
    """The geometry by the standard fields alone.

    layer_types decide; without them sliding_window with its pattern, then sliding_window or
    attention_chunk_size for all layers, then all flat. Raises `UnknownLayerTypeError` for
    encoders and for fields that bear on what is cached and are not known.
    """
    if is_encoder(fields.family, fields.raw("architectures")):
        raise UnknownLayerTypeError(
            f"{fields.family} is an encoder by the names of its model ({fields.family!r}, "
            f"{fields.raw('architectures')!r}): it attends to both sides, so that there is no next "
            "token to keep keys and values for. Give the config of the decoder itself"
        )
    kinds = listed_kinds(fields) or _kinds_by_window(fields)
    _refuse_unknown_memory(fields, kinds)
    shared = fields.optional_integer("num_kv_shared_layers", 0) or 0
    return stack_kinds(fields, kinds, with_global(fields, kinds), shared)


def _kinds_by_window(fields: Fields) -> tuple[MemoryKind, ...]:
    count = fields.layer_count
    unused = fields.raw("use_sliding_window") is not None and not fields.flag("use_sliding_window")
    if not unused:
        if fields.raw("sliding_window_pattern") is not None:
            return by_pattern(fields)
        if fields.optional_integer("sliding_window") is not None:
            return (*all_of("flat", _full_first(fields)), *all_of("ring", count))[:count]
    if fields.optional_integer("attention_chunk_size") is not None:
        return all_of("chunk", count)
    return all_of("flat", count)


def _full_first(fields: Fields) -> int:
    """max_window_layers: despite its name, the layers *before* it attend to everything."""
    first = fields.optional_integer("max_window_layers", 0)
    if first is not None and fields.raw("use_sliding_window") is None:
        # Where both are known, an absent switch means off in some families and on in others.
        raise fields.error("use_sliding_window", None, "true or false beside 'max_window_layers'")
    return first or 0


def _refuse_unknown_memory(fields: Fields, kinds: Sequence[MemoryKind]) -> None:
    found = next(bearing_fields(fields.values, "recurrent" in kinds), None)
    if found is not None:
        raise UnknownLayerTypeError(
            f"{fields.family} is not a model_type with a known caching rule, and its config field "
            f"{found!r} ({fields.values[found]!r}) bears on what it attends to or caches in a way "
            "that the standard fields do not describe. Trace the loaded model instead "
            "(mlx_kvcache.integrations.tracing), or add a rule (docs/model_families.md)"
        )
