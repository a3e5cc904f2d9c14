"""Where converted models live, and how one comes to be there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

HOME_VARIABLE = "MLX_KVCACHE_HOME"


def home() -> Path:
    """The directory of this package's converted models; it need not exist yet.

    `$MLX_KVCACHE_HOME`, else `$XDG_CACHE_HOME/mlx_kvcache`, else `~/.cache/mlx_kvcache`.
    """
    if own := os.environ.get(HOME_VARIABLE):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "mlx_kvcache"
    return Path.home() / ".cache" / "mlx_kvcache"


@dataclass(frozen=True)
class Workspace:
    """Two empty directories of a build: `model` is published, `scratch` is thrown away."""

    model: Path
    scratch: Path


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
    if is_complete(final):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{name}.lock"):
        if not is_complete(final):
            _build(final, build)
    return final


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a model's JSON files, as a person reads them too."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _build(final: Path, build: Callable[[Workspace], None]) -> None:
    root = final.parent / f".{final.name}.partial"
    _remove(root)
    workspace = Workspace(model=root / "model", scratch=root / "scratch")
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
