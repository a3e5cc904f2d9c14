"""The code blocks of the README and of `docs/`, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "tests" / "README.md",
)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^\n)((?:^(?: {4}.*)?\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block: the document it stands in, its line there, its language, and its text."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(path: Path) -> Iterator[Block]:
    """The fenced blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent, language, body = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        lines = [each.removeprefix(indent) for each in body.splitlines(keepends=True)]
        yield Block(str(path.relative_to(ROOT)), line, language, "".join(lines))


def all_blocks() -> list[Block]:
    """Those of all documents."""
    return [block for path in DOCUMENTS for block in blocks_of(path)]


def indented_code(path: Path) -> list[str]:
    """What Markdown takes for code because it is indented: pictures and commands, no Python."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [each for each in _INDENTED.findall(text) if each.strip()]
