"""The geometry in a file beside a model: written whole, and read back."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from mlx_kvcache.errors import MetadataError, ModelNotFoundError
from mlx_kvcache.facts.files import replacing
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.facts.json_text import read_json
from mlx_kvcache.facts.metadata import metadata_of

METADATA_FILE = "kv_cache.json"


def write_metadata(geometry: CacheGeometry, directory: str | PathLike[str]) -> Path:
    """Write `kv_cache.json` into an existing directory, beside a model; answer its path.

    A reader sees the old file or the new one, never a part. Raises `ModelNotFoundError` when the
    directory does not exist, `MetadataError` when the geometry breaks a rule or the file cannot
    be written; the old file then stays.
    """
    content = json.dumps(metadata_of(geometry), indent=2) + "\n"
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
        return CacheGeometry.from_metadata(read_json(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no cache metadata at {file}; write_metadata(geometry, directory) makes it, "
            "and CacheGeometry.from_hf reads a config.json instead"
        ) from error
    except MetadataError as error:
        raise MetadataError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise MetadataError(f"{file} cannot be read as JSON: {error}") from error
