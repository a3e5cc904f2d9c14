"""Where converted models live, and how one comes to be there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from mlx_kvcache.facts.files import expanded
from mlx_kvcache.facts.json_text import read_json

HOME_VARIABLE = "MLX_KVCACHE_HOME"

#: In a model's directory: what it was made of. Its time of change is that of its last use.
SOURCE = "mlx_kvcache.json"


def home() -> Path:
    """The directory of this package's converted models; it need not exist yet.

    `$MLX_KVCACHE_HOME`, else `$XDG_CACHE_HOME/mlx_kvcache`, else `~/.cache/mlx_kvcache`.
    """
    if own := os.environ.get(HOME_VARIABLE):
        return expanded(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expanded(shared) / "mlx_kvcache"
    return Path.home() / ".cache" / "mlx_kvcache"


@dataclass(frozen=True)
class Workspace:
    """Two empty directories of a build: `model` is published, `scratch` is thrown away.

    final: where the model will be.
    """

    model: Path
    scratch: Path
    final: Path


@dataclass(frozen=True)
class Source:
    """What a converted model was made of: its name, where it came from, its SHA-256."""

    name: str
    origin: str
    sha256: str


def has_weights(directory: Path) -> bool:
    """Whether `directory` holds weights under the names that mlx-lm reads."""
    return any(directory.glob("model*.safetensors"))


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a whole model: its config and its weights."""
    return (directory / "config.json").is_file() and has_weights(directory)


def build_once(name: str, build: Callable[[Workspace], None]) -> Path:
    """The directory `home() / name`, made by `build` if it is not there yet.

    The model is made beside its final place and renamed into it as the last act, so a reader
    sees all of it or nothing. One process builds at a time; the others wait and then take
    what it made. Whatever a killed build left behind is cleared before the next one.
    """
    final = home() / name
    if not is_complete(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_path(final)):
            if not is_complete(final):
                _build(final, build)
    # When it was last asked for; `models` tells it.
    with suppress(OSError):
        os.utime(final / SOURCE)
    return final


def lock_path(final: Path) -> Path:
    """The lock that a process holds while it makes, or deletes, the model `final`."""
    return final.parent / f".{final.name}.lock"


def partial_path(final: Path) -> Path:
    """Where `final` is being made."""
    return final.parent / f".{final.name}.partial"


def write_source(directory: Path, source: Source) -> None:
    """Note in a model's directory what it was made of."""
    write_json(directory / SOURCE, asdict(source))


def read_source(directory: Path) -> Source | None:
    """What the model in `directory` was made of; None where nothing, or nonsense, is noted."""
    try:
        return Source(**read_json((directory / SOURCE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a model's JSON files, as a person reads them too."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _build(final: Path, build: Callable[[Workspace], None]) -> None:
    root = partial_path(final)
    _remove(root)
    workspace = Workspace(model=root / "model", scratch=root / "scratch", final=final)
    try:
        workspace.model.mkdir(parents=True)
        workspace.scratch.mkdir()
        build(workspace)
        _remove(final)
        os.rename(workspace.model, final)
    finally:
        _remove(root)


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
