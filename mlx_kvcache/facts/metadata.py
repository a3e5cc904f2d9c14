"""The geometry as plain metadata: written into a saved cache or beside a model, and read back.

    {"version": 1, "n_caches": 2, "kv_heads": [8, 4], "key_dims": [64, 80],
     "value_dims": [64, 80], "windows": [0, 512], "shared": [false, false],
     "model_layers": [{"caches": [0], "shares": false, "recurrent": false}, ...]}

A window of 0 is a flat layer. Capacity and dtype are the run's choice and never stand here.
Writer and reader hold what they have in hand against the same rules, and neither trusts the other:
a broken geometry must not reach a file, nor the file of a buggy writer a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_kvcache.errors import MetadataError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.layers import LayerGeometry, LayerMap, LayerPolicy, ModelLayer

#: Raised whenever an old reader would misunderstand the fields. A field that it may ignore is
#: added without.
VERSION = 1

#: The columns of integers, one entry for each cache layer, and the lowest that each may hold.
_NUMBERS = {"kv_heads": 1, "key_dims": 1, "value_dims": 0, "windows": 0}
_COLUMNS = (*_NUMBERS, "shared")
_FLAGS = ("shares", "recurrent")
_ANEW = "write it anew with CacheGeometry.to_metadata()"


def make_metadata(
    *,
    kv_heads: Sequence[int],
    key_dims: Sequence[int],
    value_dims: Sequence[int],
    windows: Sequence[int],
    shared: Sequence[bool] | None = None,
    model_layers: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Metadata from its columns, one entry for each cache layer; for whoever has no geometry.

    windows: 0 = flat. shared: False when not given. model_layers: one
    `{"caches": [...], "shares": bool, "recurrent": bool}` for each layer of the model; when not
    given, model layer i reads cache layer i. Raises `MetadataError`.
    """
    count = _length("kv_heads", kv_heads)
    metadata = {
        "version": VERSION,
        "n_caches": count,
        "kv_heads": kv_heads,
        "key_dims": key_dims,
        "value_dims": value_dims,
        "windows": windows,
        "shared": [False] * count if shared is None else shared,
        "model_layers": model_layers,
    }
    if model_layers is None:
        metadata["model_layers"] = [_record(ModelLayer((index,))) for index in range(count)]
    return metadata_of(layers_from_metadata(metadata))


def metadata_of(geometry: LayerMap) -> dict[str, Any]:
    """The metadata of a geometry. Raises `MetadataError` when it breaks a rule."""
    if not isinstance(geometry, LayerMap):
        raise MetadataError(f"a CacheGeometry is needed, got {type(geometry).__name__}")
    layers = geometry.layers
    metadata = {
        "version": VERSION,
        "n_caches": len(layers),
        "kv_heads": [layer.kv_heads for layer in layers],
        "key_dims": [layer.key_dim for layer in layers],
        "value_dims": [layer.value_dim for layer in layers],
        "windows": list(geometry.windows),
        "shared": [layer.shared for layer in layers],
        "model_layers": [_record(layer) for layer in geometry.model_layers],
    }
    _check(metadata)
    return metadata


def _record(layer: ModelLayer) -> dict[str, Any]:
    return {"caches": list(layer.caches), "shares": layer.shares, "recurrent": layer.recurrent}


def layers_from_metadata(metadata: Mapping[str, Any]) -> LayerMap:
    """The geometry that metadata describes.

    Fields that this version does not know are ignored. Raises `MetadataError`, which names the
    field, for anything missing or malformed and for an unknown version.
    """
    _check(metadata)
    layers = tuple(
        LayerGeometry(LayerPolicy.from_window(window), kv_heads, key_dim, value_dim, shared)
        for kv_heads, key_dim, value_dim, window, shared in zip(
            *(metadata[name] for name in _COLUMNS), strict=True
        )
    )
    model_layers = tuple(
        ModelLayer(tuple(layer["caches"]), layer["shares"], layer["recurrent"])
        for layer in metadata["model_layers"]
    )
    return LayerMap(layers, model_layers)


def _check(metadata: Mapping[str, Any]) -> None:
    """Every rule of metadata: which fields it has, how many entries, and what these may be."""
    _require_fields("metadata", metadata, ("version",))
    if not is_integer(metadata["version"], VERSION, VERSION):
        raise MetadataError(
            f"metadata of version {metadata['version']!r} cannot be read: this package knows "
            f"version {VERSION}; install the version of it that wrote the metadata, or {_ANEW}"
        )
    _require_fields("metadata", metadata, ("n_caches", *_COLUMNS, "model_layers"))
    lengths = {name: _length(name, metadata[name]) for name in _COLUMNS}
    count = metadata["n_caches"]
    _require(is_integer(count, 1), "n_caches", count, "an integer >= 1")
    for name, length in lengths.items():
        if length != count:
            raise MetadataError(
                f"metadata field {name!r} has {length} entries, but kv_heads has "
                f"{lengths['kv_heads']} and n_caches is {count}; give one for each cache layer"
            )
    for name, lowest in _NUMBERS.items():
        for index, number in enumerate(metadata[name]):
            wanted = f"an integer >= {lowest}"
            _require(is_integer(number, lowest), f"{name}[{index}]", number, wanted)
    for index, flag in enumerate(metadata["shared"]):
        _require(isinstance(flag, bool), f"shared[{index}]", flag, "true or false")
    if not _length("model_layers", metadata["model_layers"]):
        raise MetadataError(f"metadata field 'model_layers' has 0 entries; {_ANEW}")
    for index, layer in enumerate(metadata["model_layers"]):
        _check_model_layer(f"model_layers[{index}]", layer, count)


def _check_model_layer(name: str, layer: Mapping[str, Any], count: int) -> None:
    _require_fields(name, layer, ("caches", *_FLAGS))
    _length(f"{name}.caches", layer["caches"])
    for cache in layer["caches"]:
        wanted = f"a list of cache layers 0 to {count - 1}"
        _require(is_integer(cache, 0, count - 1), f"{name}.caches", layer["caches"], wanted)
    for flag in _FLAGS:
        _require(isinstance(layer[flag], bool), f"{name}.{flag}", layer[flag], "true or false")


def _require_fields(name: str, holder: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    _require(isinstance(holder, Mapping), name, holder, "a mapping of fields")
    missing = [field for field in fields if field not in holder]
    if missing:
        raise MetadataError(f"{name} lacks {', '.join(missing)}; {_ANEW}")


def _length(name: str, values: Sequence[Any]) -> int:
    _require(isinstance(values, (list, tuple)), name, values, "a list")
    return len(values)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise MetadataError(
            f"metadata field {name!r} must be {wanted}, got {shortened(value)}; correct it, or "
            f"{_ANEW}"
        )
