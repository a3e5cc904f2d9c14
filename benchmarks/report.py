"""How a benchmark shows what it found: tables on a terminal or in Markdown, and a JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from common import Machine
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_FILE_WIDTH = 150
#: Options that the benchmarks share.
MarkdownFlag = Annotated[bool, typer.Option("--markdown", help="Plain Markdown tables.")]
JSONFile = Annotated[
    Path | None, typer.Option("--json", help="Also write everything to this file.", dir_okay=False)
]


@dataclass
class Report:
    """One run: its machine and settings, the tables to show, the results to write."""

    benchmark: str
    machine: Machine
    settings: dict[str, Any]
    markdown: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: _console())

    def header(self) -> None:
        """Where and how the figures were taken; always the first thing shown."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        for line in (self.machine.warning, self.machine.line, settings):
            if line:
                self.note(line, style="bold" if line == self.machine.warning else "")

    def note(self, text: str, style: str = "") -> None:
        """A line of text."""
        if self.markdown:
            print(f"**{text}**\n" if style == "bold" else f"{text}\n", flush=True)
        else:
            self.console.print(escape(text), style=style, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; the first column holds names, the others figures."""
        if self.markdown:
            print(markdown_table(title, columns, rows), flush=True)
            return
        table = Table(title=escape(title), title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(escape(column), justify="right" if number else "left")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.console.print(table)

    def write(self, path: Path) -> None:
        """Everything as one JSON object, written at once or not at all."""
        content = {
            "benchmark": self.benchmark,
            "machine": self.machine.as_dict(),
            "settings": self.settings,
            "results": self.results,
        }
        text = json.dumps(content, indent=2) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self.note(f"written: {path}")


def _console() -> Console:
    """The terminal as it is; wide enough for every table where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def markdown_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table under its title."""
    rule = ["---", *("---:" for _ in columns[1:])]
    lines = [f"**{title}**", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows)]
    return "\n".join(lines) + "\n"


def mebibytes(count: float) -> str:
    """A byte count, readable."""
    return f"{count / 2**20:,.1f} MiB"


def require_directory(path: Path | None) -> None:
    """Raise a usage error, before anything is measured, if `path` could not be written."""
    if path is not None and not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.resolve().parent} to write to")
