"""From what a user typed to a model directory or a model's config."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Any

from mlx_kvcache.errors import ConfigError, ModelFormatError, ModelNotFoundError
from mlx_kvcache.facts.files import expanded
from mlx_kvcache.facts.json_text import read_json
from mlx_kvcache.models.convert import convert_cached
from mlx_kvcache.models.demos import DEMOS, demo_directory
from mlx_kvcache.models.gguf_config import config_from
from mlx_kvcache.models.gguf_file import is_gguf, open_gguf

# Which files to take from the hub; nothing named means all that mlx-lm reads.
_ALL: tuple[str, ...] = ()
_CONFIG_ONLY = ("config.json",)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str | Path, *, revision: str | None = None) -> Path:
    """The local directory of a model; it is downloaded and converted first where needed.

    `name` is a demo (`available()` lists them), a directory, the `config.json` in one, a
    `.gguf` file, or a hub id `org/model`, of which `revision` picks a branch, a tag or a commit.
    No weights are loaded, and a directory need not have any. Raises ConfigError for a revision of
    what is not on the hub, ModelNotFoundError, ModelFormatError or UnsupportedModelError.
    """
    text = str(name)
    path = _checked_existing(text, revision)
    if text in DEMOS:
        return demo_directory(DEMOS[text])
    return _from_hub(text, _ALL, revision) if path is None else _resolve_local(path)


def read_config(name: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """The config of a model, as in its `config.json`, without its weights.

    Takes what `resolve` takes, and a config file under any `.json` name; a `.gguf` file is only
    read, not converted, and of a hub model only the config is downloaded. Raises as `resolve`.
    """
    text = str(name)
    path = _checked_existing(text, revision)
    if text in DEMOS:
        return parse_config(resolve(text) / "config.json")
    if path is None:
        return parse_config(_from_hub(text, _CONFIG_ONLY, revision) / "config.json")
    if path.suffix == ".json" and path.is_file():
        return parse_config(path)
    if path.is_file() and is_gguf(path):
        return config_from(open_gguf(path))
    return parse_config(_resolve_local(path) / "config.json")


def parse_config(path: Path) -> dict[str, Any]:
    """The `config.json` at `path`. Raises ModelFormatError when it is not a JSON object."""
    try:
        config = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFormatError(f"{path} holds a {type(config).__name__}, not a JSON object")
    return config


def _existing(text: str) -> Path | None:
    path = expanded(text)
    return path if text and path.exists() else None


def _checked_existing(text: str, revision: str | None) -> Path | None:
    """The local path that `text` names, if it does; only what is not local has revisions."""
    path = _existing(text)
    if revision is not None and (text in DEMOS or path is not None):
        raise ConfigError(
            f"{text!r} is no model of the hub, so it has no revision {revision!r}; leave it out"
        )
    return path


def _resolve_local(path: Path) -> Path:
    if path.is_dir():
        return _checked_directory(path)
    if path.name == "config.json":
        return path.resolve().parent
    if path.suffix == ".gguf" or is_gguf(path):
        return convert_cached(path)
    raise ModelFormatError(
        f"{path} is neither a .gguf file nor a config.json; pass a model's directory or .gguf file"
    )


def _checked_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    hint = "a Hugging Face model directory has one"
    if found := sorted(path.glob("*.gguf")):
        hint = f"pass the GGUF file itself: {found[0]}"
    raise ModelNotFoundError(f"there is no config.json in {path}; {hint}")


def _hub_id(text: str) -> str:
    """`text` if it can be a hub id; else the error says what it may have been meant to be."""
    looks_local = text.startswith((".", "/", "~")) or text.endswith((".gguf", ".json"))
    if not looks_local and _HUB_ID.fullmatch(text):
        return text
    if looks_local or "/" in text:
        raise ModelNotFoundError(f"there is no file or directory {text}")
    close = difflib.get_close_matches(text.lower(), DEMOS, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    raise ModelNotFoundError(
        f"no model is named {text!r}{guess} Named demos: {', '.join(DEMOS)}. Anything else is a "
        "path to a directory or a .gguf file, or a hub id like 'org/model'"
    )


def _from_hub(text: str, patterns: tuple[str, ...], revision: str | None) -> Path:
    """The local snapshot of a hub model, with the files that `patterns` names.

    The hub's client shows its bars on a terminal; elsewhere nothing is shown.
    """
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    identifier = _hub_id(text)
    allowed = list(patterns or DEFAULT_ALLOW_PATTERNS)
    try:
        snapshot = Path(
            snapshot_download(
                identifier, revision=revision, allow_patterns=allowed, tqdm_class=_bars()
            )
        )
    # The hub client lets errors of its HTTP library through, and that library has changed.
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        asked = "" if revision is None else f" at revision {revision!r}"
        raise ModelNotFoundError(
            f"{identifier!r} is no local path, and it could not be taken{asked} from the Hugging "
            f"Face hub ({type(error).__name__}: {reason}). Check the id, the network, "
            "HF_HUB_OFFLINE and, for a gated model, HF_TOKEN; or pass a local directory or .gguf "
            "file, or the demo 'smollm2'"
        ) from error
    return _checked_directory(snapshot)


def _bars() -> type[Any] | None:
    """The class of the hub client's bars, silent where there is no terminal; None for its own."""
    if sys.stderr.isatty():
        return None
    from huggingface_hub import utils

    bars: Any = utils.tqdm  # type: ignore[attr-defined]

    class Silent(bars):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent
