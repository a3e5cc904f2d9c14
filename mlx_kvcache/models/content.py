"""The hash of a file's content, computed once for each file as it stands on the disk."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from mlx_kvcache.errors import ModelFormatError
from mlx_kvcache.facts.files import replacing
from mlx_kvcache.facts.json_text import read_json
from mlx_kvcache.models.progress import showing, size_text
from mlx_kvcache.models.store import home

#: In the cache directory: the hashes of the files that were last asked for.
INDEX = "hashes.json"
#: So many are kept, the last ones.
KEPT = 256

_READ_BYTES = 1 << 22
#: Smaller files are read before a bar could be.
_SHOWN_BYTES = 256 << 20


@dataclass(frozen=True)
class Content:
    """What a file held: its SHA-256, in hex, and the facts of the disk by which it was read."""

    sha256: str
    facts: tuple[int, ...]


def content_of(path: Path) -> Content:
    """The content of the file at `path`; one that was remembered is not read again.

    Raises OSError, or ModelFormatError when the file changes meanwhile.
    """
    facts = _facts(path)
    known = _read().get(str(path))
    if isinstance(known, dict) and known.get("facts") == [*facts]:
        return Content(str(known.get("sha256")), facts)
    content = Content(_hash(path), facts)
    check_unchanged(path, content)
    return content


def check_unchanged(path: Path, content: Content) -> None:
    """Raise ModelFormatError if the file at `path` is no longer the one that was read."""
    if _facts(path) != content.facts:
        raise ModelFormatError(f"{path} changed while it was read; start again when it is whole")


def remember(path: Path, content: Content) -> None:
    """Let `content_of` know the file from now on, among the last `KEPT`.

    What keeps the index from being written is no reason to stop.
    """
    if _read().get(str(path)) == _entry(content):
        return
    with suppress(OSError):
        home().mkdir(parents=True, exist_ok=True)
        with FileLock(home() / f".{INDEX}.lock"):
            index = {name: each for name, each in _read().items() if name != str(path)}
            index[str(path)] = _entry(content)
            last = dict(list(index.items())[-KEPT:])
            with replacing(home() / INDEX) as partial:
                partial.write_text(json.dumps(last, indent=1), encoding="utf-8")


def _entry(content: Content) -> dict[str, Any]:
    return {"facts": [*content.facts], "sha256": content.sha256}


def _facts(path: Path) -> tuple[int, ...]:
    """What changes with the content: size, time of change, and the file system's own note of it."""
    facts = path.stat()
    return (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def _hash(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < _SHOWN_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, parts = hashlib.sha256(), -(-size // _READ_BYTES)
        with showing(f"Hashing {path.name} ({size_text(size)})", total=parts) as advance:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                advance()
    return digest.hexdigest()


def _read() -> dict[str, Any]:
    """The index; none where there is none, or it is not what was written."""
    try:
        index = read_json((home() / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}
