"""`mlx-kvcache models`: what can be loaded by name, what is kept on the disk, and its deletion."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mlx_kvcache.commands.chat_input import on_terminal
from mlx_kvcache.commands.console import print_note, write_json
from mlx_kvcache.errors import ConfigError, ModelNotFoundError

if TYPE_CHECKING:
    from mlx_kvcache.models.catalog import Entry


def models(
    delete: Annotated[
        str | None,
        typer.Option(
            help="Delete the models of this name: as listed, a demo's, or a .gguf file's.",
            show_default=False,
        ),
    ] = None,
    delete_all: Annotated[
        bool, typer.Option("--delete-all", help="Delete all that is listed as kept.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """List the demos and the converted models that are kept, or delete some.

    Demos and .gguf files are converted once and kept; what is deleted is made again when it is
    asked for. Models of the Hugging Face hub are kept by the hub's own client (see `hf cache`).

    Examples:

    ```sh
    mlx-kvcache models
    mlx-kvcache models --json | jq .bytes
    mlx-kvcache models --delete smollm2
    mlx-kvcache models --delete-all --yes
    ```
    """
    from mlx_kvcache.models.catalog import entries

    if delete is not None and delete_all:
        raise ConfigError("--delete names one model and --delete-all means all; give one of them")
    if as_json and (delete_all or delete is not None):
        raise ConfigError("--json lists; it does not go with --delete or --delete-all")
    found = entries()
    if delete is not None:
        _delete(_named(found, delete), yes)
    elif delete_all:
        _delete(found, yes)
    elif as_json:
        write_json(_facts(found))
    else:
        _show(found)


def _named(found: tuple[Entry, ...], name: str) -> tuple[Entry, ...]:
    chosen = tuple(entry for entry in found if entry.is_called(name))
    if not chosen:
        kept = ", ".join(entry.name for entry in found) or "none"
        raise ModelNotFoundError(f"no model {name!r} is kept; kept are: {kept}")
    return chosen


def _delete(chosen: tuple[Entry, ...], yes: bool) -> None:
    from mlx_kvcache.models.catalog import delete
    from mlx_kvcache.models.progress import size_text

    if not chosen:
        print_note("no model is kept")
        return
    total = size_text(sum(entry.nbytes for entry in chosen))
    for entry in chosen:
        print_note(f"{entry.name}: {size_text(entry.nbytes)} in {entry.directory}")
    if not yes and not _agreed(f"Delete {_count(len(chosen))} ({total})?"):
        print_note("nothing was deleted")
        return
    for entry in chosen:
        delete(entry.name)
        print_note(f"deleted {entry.name}")


def _agreed(question: str) -> bool:
    """Ask on the terminal. Raises `ConfigError` where nobody can be asked."""
    if not on_terminal():
        raise ConfigError(f"{question} There is no terminal to ask at; say so with --yes")
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as error:
        raise KeyboardInterrupt from error


def _count(number: int) -> str:
    return "1 model" if number == 1 else f"{number} models"


def _facts(found: tuple[Entry, ...]) -> dict[str, Any]:
    from mlx_kvcache import models as names

    return {
        "home": str(names.home()),
        "bytes": sum(entry.nbytes for entry in found),
        "models": [
            {
                "name": entry.name,
                "state": entry.state.value,
                "bytes": entry.nbytes,
                "used": datetime.fromtimestamp(entry.used).astimezone().isoformat("T", "seconds"),
                "directory": str(entry.directory),
                "source": None
                if entry.source is None
                else {
                    "name": entry.source.name,
                    "origin": entry.source.origin,
                    "sha256": entry.source.sha256,
                },
            }
            for entry in found
        ],
        "demos": [
            {
                "name": demo.name,
                "description": demo.description,
                "license": demo.license,
                "download_bytes": demo.download_bytes,
            }
            for demo in names.available()
        ],
    }


def _show(found: tuple[Entry, ...]) -> None:
    from mlx_kvcache import models as names
    from mlx_kvcache.models.progress import size_text

    console = Console(highlight=False, soft_wrap=True)
    demos = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("demo", "download", "license", "what it is"):
        demos.add_column(title, no_wrap=title != "what it is")
    for demo in names.available():
        demos.add_row(demo.name, size_text(demo.download_bytes), demo.license, demo.description)
    kept = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("kept", "state", "size", "last used", "made of"):
        kept.add_column(title, no_wrap=title != "made of")
    for entry in found:
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        origin = "" if entry.source is None else entry.source.origin
        kept.add_row(entry.name, entry.state.value, size_text(entry.nbytes), used, origin)
    total = size_text(sum(entry.nbytes for entry in found))
    # Written by us, since rich ends the process with a status of its own on a broken pipe.
    with console.capture() as report:
        console.print(demos)
        console.print()
        if found:
            console.print(kept)
        console.print(f"{_count(len(found))} kept in {names.home()}, {total}")
    sys.stdout.write(report.get())
    sys.stdout.flush()
