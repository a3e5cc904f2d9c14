"""The geometry as plain metadata: written into a saved cache or beside a model, and read back.

Writer and reader check every rule, each in its own words and on its own data: the file that a
buggy writer left must not reach a cache, and a broken geometry must not reach a file.

    {"version": 1, "n_caches": 2, "kv_heads": [8, 4], "key_dims": [64, 80],
     "value_dims": [64, 80], "windows": [0, 512], "shared": [false, false],
     "model_layers": [{"caches": [0], "shares": false, "recurrent": false}, ...]}

A window of 0 is a flat layer. Capacity and dtype are the run's choice and never stand here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

from mlx_kvcache.errors import MetadataError, ModelNotFoundError
from mlx_kvcache.facts.files import replacing
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer

#: Raised whenever an old reader would misunderstand the fields. A field that it may ignore is
#: added without.
VERSION = 1
METADATA_FILE = "kv_cache.json"

_FIELDS = (
    "n_caches",
    "kv_heads",
    "key_dims",
    "value_dims",
    "windows",
    "shared",
    "model_layers",
)
_REMEDY = "write it anew with CacheGeometry.to_metadata()"


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
    count = len(_listed("kv_heads", kv_heads))
    if count == 0:
        raise MetadataError("there is no cache layer to describe; metadata needs at least one")
    if shared is None:
        shared = [False] * count
    if model_layers is None:
        model_layers = [
            {"caches": [index], "shares": False, "recurrent": False} for index in range(count)
        ]
    return {
        "version": VERSION,
        "n_caches": count,
        "kv_heads": _numbers("kv_heads", kv_heads, count, 1),
        "key_dims": _numbers("key_dims", key_dims, count, 1),
        "value_dims": _numbers("value_dims", value_dims, count, 0),
        "windows": _numbers("windows", windows, count, 0),
        "shared": _flags("shared", shared, count),
        "model_layers": _layer_records(model_layers, count),
    }


def geometry_to_metadata(geometry: CacheGeometry) -> dict[str, Any]:
    """The metadata of a geometry. Raises `MetadataError` when it breaks a rule."""
    if not isinstance(geometry, CacheGeometry):
        raise MetadataError(f"a CacheGeometry is needed, got {type(geometry).__name__}")
    return make_metadata(
        kv_heads=[layer.kv_heads for layer in geometry.layers],
        key_dims=[layer.key_dim for layer in geometry.layers],
        value_dims=[layer.value_dim for layer in geometry.layers],
        windows=geometry.windows,
        shared=[layer.shared for layer in geometry.layers],
        model_layers=[
            {"caches": layer.caches, "shares": layer.shares, "recurrent": layer.recurrent}
            for layer in geometry.model_layers
        ],
    )


def _listed(name: str, values: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise MetadataError(f"{name} must be a list or a tuple, got {type(values).__name__}")
    return values


def _same_length(name: str, values: Sequence[Any], count: int) -> Sequence[Any]:
    if len(_listed(name, values)) != count:
        raise MetadataError(
            f"{name} has {len(values)} entries, but kv_heads has {count}; "
            "give one for each cache layer"
        )
    return values


def _numbers(name: str, values: Sequence[int], count: int, minimum: int) -> list[int]:
    for index, value in enumerate(_same_length(name, values, count)):
        # bool is a kind of int in Python, and JSON tells them apart.
        if type(value) is not int or value < minimum:
            raise MetadataError(
                f"{name} of cache layer {index} must be an integer >= {minimum}, got {value!r}"
            )
    return list(values)


def _flags(name: str, values: Sequence[bool], count: int) -> list[bool]:
    for index, value in enumerate(_same_length(name, values, count)):
        if type(value) is not bool:
            raise MetadataError(
                f"{name} of cache layer {index} must be True or False, got {value!r}"
            )
    return list(values)


def _layer_records(layers: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    if not _listed("model_layers", layers):
        raise MetadataError("model_layers must name at least one layer of the model")
    return [_layer_record(number, layer, count) for number, layer in enumerate(layers)]


def _layer_record(number: int, layer: Mapping[str, Any], count: int) -> dict[str, Any]:
    name = f"model layer {number}"
    if not isinstance(layer, Mapping) or set(layer) != {"caches", "shares", "recurrent"}:
        raise MetadataError(
            f"{name} must be a mapping with caches, shares and recurrent, got {layer!r}"
        )
    caches = list(_listed(f"caches of {name}", layer["caches"]))
    if any(type(cache) is not int or not 0 <= cache < count for cache in caches):
        raise MetadataError(f"{name} may read cache layers 0 to {count - 1}, got {caches!r}")
    for flag in ("shares", "recurrent"):
        if type(layer[flag]) is not bool:
            raise MetadataError(f"{flag} of {name} must be True or False, got {layer[flag]!r}")
    return {"caches": caches, "shares": layer["shares"], "recurrent": layer["recurrent"]}


def geometry_from_metadata(metadata: Mapping[str, Any]) -> CacheGeometry:
    """The geometry that metadata describes.

    Fields that this version does not know are ignored. Raises `MetadataError`, which names the
    field, for anything missing or malformed and for an unknown version.
    """
    if not isinstance(metadata, Mapping):
        raise _malformed("metadata", metadata, "a mapping of fields")
    if "version" not in metadata:
        raise MetadataError(f"metadata has no field 'version'; {_REMEDY}")
    version = metadata["version"]
    if not _is_integer(version) or version != VERSION:
        raise MetadataError(
            f"metadata of version {version!r} cannot be read: this package knows version "
            f"{VERSION}; install the version of it that wrote the metadata, or {_REMEDY}"
        )
    missing = [name for name in _FIELDS if name not in metadata]
    if missing:
        raise MetadataError(f"metadata lacks {', '.join(missing)}; {_REMEDY}")
    return CacheGeometry(_read_layers(metadata), _read_model_layers(metadata))


def _read_layers(metadata: Mapping[str, Any]) -> tuple[LayerGeometry, ...]:
    count = metadata["n_caches"]
    if not _is_integer(count) or count < 1:
        raise _malformed("n_caches", count, "a positive integer")
    columns = {name: metadata[name] for name in _FIELDS[1:6]}
    for name, column in columns.items():
        if not isinstance(column, (list, tuple)):
            raise _malformed(name, column, "a list")
        if len(column) != count:
            raise MetadataError(
                f"metadata field {name!r} has {len(column)} entries, but n_caches is {count}; "
                f"{_REMEDY}"
            )
    return tuple(
        _read_layer(index, *row) for index, row in enumerate(zip(*columns.values(), strict=True))
    )


def _read_layer(
    index: int, kv_heads: object, key_dim: object, value_dim: object, window: object, shared: object
) -> LayerGeometry:
    if not _is_integer(kv_heads) or kv_heads <= 0:
        raise _malformed(f"kv_heads[{index}]", kv_heads, "a positive integer")
    if not _is_integer(key_dim) or key_dim <= 0:
        raise _malformed(f"key_dims[{index}]", key_dim, "a positive integer")
    if not _is_integer(value_dim) or value_dim < 0:
        raise _malformed(f"value_dims[{index}]", value_dim, "an integer, 0 or more")
    if not _is_integer(window) or window < 0:
        raise _malformed(f"windows[{index}]", window, "an integer, 0 (flat) or more")
    if not isinstance(shared, bool):
        raise _malformed(f"shared[{index}]", shared, "true or false")
    return LayerGeometry(LayerPolicy.from_window(window), kv_heads, key_dim, value_dim, shared)


def _read_model_layers(metadata: Mapping[str, Any]) -> tuple[ModelLayer, ...]:
    layers, count = metadata["model_layers"], metadata["n_caches"]
    if not isinstance(layers, (list, tuple)) or not layers:
        raise _malformed("model_layers", layers, "a list with an entry for each model layer")
    return tuple(_read_model_layer(f"model_layers[{i}]", e, count) for i, e in enumerate(layers))


def _read_model_layer(name: str, entry: object, count: int) -> ModelLayer:
    if not isinstance(entry, Mapping):
        raise _malformed(name, entry, "an object")
    for field in ("caches", "shares", "recurrent"):
        if field not in entry:
            raise MetadataError(f"metadata field {name!r} lacks {field!r}; {_REMEDY}")
    caches, shares, recurrent = entry["caches"], entry["shares"], entry["recurrent"]
    if not isinstance(caches, (list, tuple)):
        raise _malformed(f"{name}.caches", caches, "a list")
    for cache in caches:
        if not _is_integer(cache) or cache < 0 or cache >= count:
            raise _malformed(f"{name}.caches", caches, f"indices of the {count} cache layers")
    for field, flag in (("shares", shares), ("recurrent", recurrent)):
        if not isinstance(flag, bool):
            raise _malformed(f"{name}.{field}", flag, "true or false")
    return ModelLayer(tuple(caches), shares, recurrent)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _malformed(name: str, value: object, wanted: str) -> MetadataError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return MetadataError(f"metadata field {name!r} must be {wanted}, got {shown}; {_REMEDY}")


def write_metadata(geometry: CacheGeometry, directory: str | PathLike[str]) -> Path:
    """Write `kv_cache.json` into an existing directory, beside a model; answer its path.

    A reader sees the old file or the new one, never a part. Raises `ModelNotFoundError` when the
    directory does not exist, `MetadataError` when the geometry breaks a rule or the file cannot
    be written; the old file then stays.
    """
    content = json.dumps(geometry_to_metadata(geometry), indent=2) + "\n"
    file = Path(directory) / METADATA_FILE
    if not file.parent.is_dir():
        raise ModelNotFoundError(
            f"there is no directory {file.parent} to write {METADATA_FILE} into; "
            "give the directory of a model"
        )
    try:
        with replacing(file) as partial:
            partial.write_text(content, encoding="utf-8")
    except OSError as error:
        raise MetadataError(f"{file} cannot be written: {error}") from error
    return file


def read_metadata(path: str | PathLike[str]) -> CacheGeometry:
    """The geometry in a metadata file, or in the `kv_cache.json` of a directory.

    Raises `ModelNotFoundError` when there is no such file, and `MetadataError`, which names the
    file, when it cannot be read or is malformed.
    """
    file = Path(path)
    if file.is_dir():
        file = file / METADATA_FILE
    try:
        return geometry_from_metadata(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no cache metadata at {file}; write_metadata(geometry, directory) makes it, "
            "and CacheGeometry.from_hf reads a config.json instead"
        ) from error
    except MetadataError as error:
        raise MetadataError(f"{file}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise MetadataError(f"{file} cannot be read as JSON: {error}") from error
