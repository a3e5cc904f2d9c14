"""Imports point one way through the rooms of the package, and never in a circle.

Every import statement is read, at the top of a module, inside a function and under
`TYPE_CHECKING` alike: what a type checker must follow, a reader must follow too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "mlx_kvcache"

#: From left to right; each room may import the rooms to its left.
LINE = ("facts", "layout", "store", "cache", "control", "integrations")
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    **{room: frozenset(LINE[:place]) for place, room in enumerate(LINE)},
    "models": frozenset({"facts", "integrations"}),
    "engine": frozenset({*LINE, "models"}),
    "chat": frozenset({*LINE, "models"}),
    # The commands may also use the package by its public names.
    "commands": frozenset({*LINE, "models", "engine", "chat", PACKAGE}),
}
#: Modules beside the rooms, and what they may import.
APART: Mapping[str, frozenset[str]] = {
    f"{PACKAGE}.errors": frozenset(),
    f"{PACKAGE}.__main__": frozenset({"commands"}),
    # The former place of the geometry.
    f"{PACKAGE}.geometry": frozenset({"facts"}),
    PACKAGE: frozenset(MAY_IMPORT),
}
FOR_ALL = f"{PACKAGE}.errors"


@dataclass(frozen=True)
class Import:
    """One import of a module of the package by another."""

    importer: str
    imported: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.importer} imports {self.imported}"


def module_files() -> dict[str, Path]:
    """Every module of the package, by its full name."""
    files = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


MODULES = module_files()


def imports_of(module: str, source: str, path: Path, modules: Iterable[str]) -> Iterator[Import]:
    """The imports of the package in a module's source, wherever they stand in it.

    modules: the names that are modules, to tell `from package import module` from a name in it.
    """
    known = frozenset(modules)
    file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    # What a relative import counts from.
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        for name in _names(node, package):
            target = name if name in known else name.rpartition(".")[0]
            if name.split(".")[0] == PACKAGE:
                yield Import(module, target if target in known else name, file, node.lineno)


def _names(node: ast.AST, package: list[str]) -> Iterator[str]:
    """The full names that a node imports, each a module or a name in one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*start, *([node.module] if node.module else [])])
        yield from (f"{source}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        first = node.args[0]
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            yield str(first.value)


def room_of(module: str) -> str:
    """The room of a module; for one that stands apart, its own name."""
    return module if module in APART else module.split(".")[1]


def is_allowed(one: Import) -> bool:
    importer, imported = room_of(one.importer), room_of(one.imported)
    if imported in (importer, FOR_ALL):
        return True
    return imported in {**MAY_IMPORT, **APART}.get(importer, ())


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The groups of names that reach each other along the arrows."""
    onward: dict[str, set[str]] = {}
    for start, end in arrows:
        if start != end:
            onward.setdefault(start, set()).add(end)

    def reached_from(name: str) -> frozenset[str]:
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            following = onward.get(waiting.pop(), set()) - reached
            reached |= following
            waiting += following
        return frozenset(reached)

    reach = {name: reached_from(name) for name in onward}
    groups = {
        frozenset(other for other in reach[name] if name in reach.get(other, ()))
        for name in onward
        if name in reach[name]
    }
    return sorted(sorted(group) for group in groups)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """Every import of the package within the package."""
    every = (
        one
        for module, path in MODULES.items()
        for one in imports_of(module, path.read_text(encoding="utf-8"), path, MODULES)
    )
    return list(dict.fromkeys(every))


def explained(group: list[str], imports: Iterable[Import], names: Mapping[str, str]) -> str:
    """A shortest circle among the names of a group, import by import."""
    onward: dict[str, dict[str, Import]] = {}
    for one in imports:
        start, end = names[one.importer], names[one.imported]
        if start != end and {start, end} <= set(group):
            onward.setdefault(start, {}).setdefault(end, one)

    def circle_through(name: str) -> list[Import]:
        ways: dict[str, list[Import]] = {name: []}
        waiting = [name]
        for place in waiting:
            for following, one in onward[place].items():
                if following == name:
                    return [*ways[place], one]
                if following not in ways:
                    ways[following] = [*ways[place], one]
                    waiting.append(following)
        raise AssertionError(f"{name} is in no circle")

    shortest = min((circle_through(name) for name in group), key=len)
    lines = [f"  {len(group)} in circles with each other: {', '.join(group)}; one of them:"]
    return "\n".join([*lines, *(f"    {one}" for one in shortest)])


def test_every_module_is_in_a_room_or_known_to_stand_apart() -> None:
    unknown = [name for name in MODULES if room_of(name) not in {**MAY_IMPORT, **APART}]
    assert not unknown, "give these a room, or a line in APART: " + ", ".join(unknown)
    assert {room_of(name) for name in MODULES} == {*MAY_IMPORT, *APART}


def test_every_import_names_something_that_exists(imports: list[Import]) -> None:
    assert len(imports) > len(MODULES)
    missing = [str(one) for one in imports if one.imported not in MODULES]
    assert not missing, "\n".join(missing)


def test_the_arrows_point_to_the_left(imports: list[Import]) -> None:
    wrong = [str(one) for one in imports if not is_allowed(one)]
    assert not wrong, "against the order of the rooms:\n" + "\n".join(wrong)


def test_no_modules_import_in_a_circle(imports: list[Import]) -> None:
    itself = {name: name for name in MODULES}
    found = circles((one.importer, one.imported) for one in imports)
    assert not found, "circles of modules:\n" + "\n".join(
        explained(group, imports, itself) for group in found
    )


def test_no_rooms_import_in_a_circle(imports: list[Import]) -> None:
    rooms = {name: room_of(name) for name in MODULES}
    found = circles((rooms[one.importer], rooms[one.imported]) for one in imports)
    assert not found, "circles of rooms:\n" + "\n".join(
        explained(group, imports, rooms) for group in found
    )


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.stem[0] == "_"])
def test_a_room_says_what_is_in_it(package: str) -> None:
    text = ast.get_docstring(ast.parse(MODULES[package].read_text(encoding="utf-8")))
    assert text, f"{package} has no docstring"
    first = text.splitlines()[0]
    assert first.endswith("."), f"{package}: {first!r} is not one whole line of what"
    assert len(first.split()) > 3, f"{package}: {first!r} says too little"


WRONG = {
    "at the top": "from mlx_kvcache.cache.sequence import MLXSequenceCache",
    "a module from a package": "from mlx_kvcache import engine",
    "by its full name": "import mlx_kvcache.chat.conversation as conversation",
    "one of several": "from mlx_kvcache import errors, models",
    "relative": "from ..cache import sequence",
    "relative, a name": "from ..cache.sequence import MLXSequenceCache",
    "in a function": "def f():\n    from mlx_kvcache.control import op\n    return op",
    "for types only": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from mlx_kvcache.layout.sequence import SequenceLayout"
    ),
    "when another fails": "try:\n    import a\nexcept OSError:\n    import mlx_kvcache.commands",
    "by a string": "import importlib\nimportlib.import_module('mlx_kvcache.integrations.mlx_lm')",
    "the package itself": "from mlx_kvcache import CacheSession",
}
RIGHT = (
    "import json, mlx.core\n"
    "from mlx_kvcache import errors\n"
    "from mlx_kvcache.errors import KVCacheError\n"
    "from mlx_kvcache.facts.config import CacheConfig\n"
    "from . import config\n"
    "from .config import CacheConfig as Again\n"
    "from ..errors import ConfigError\n"
    "from .hf import families\n"
)


def _read(source: str, module: str = "mlx_kvcache.facts.geometry") -> list[Import]:
    return list(imports_of(module, source, MODULES[module], MODULES))


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_import_is_caught_with_its_line(how: str) -> None:
    read = _read("\n\n" + WRONG[how])
    wrong = [one for one in read if not is_allowed(one)]
    assert len(wrong) == 1, read
    lines = WRONG[how].splitlines()
    line = 3 + next(place for place, text in enumerate(lines) if PACKAGE in text or ".." in text)
    assert str(wrong[0]).startswith(f"mlx_kvcache/facts/geometry.py:{line}: ")
    assert room_of(wrong[0].imported) not in ("facts", FOR_ALL)


def test_a_right_import_is_none_of_its_business() -> None:
    read = _read(RIGHT)
    assert len(read) == 7
    assert all(is_allowed(one) for one in read)


def test_relative_imports_of_a_package_count_from_itself() -> None:
    read = _read("from .app import main\nfrom ..errors import KVCacheError", "mlx_kvcache.commands")
    assert [one.imported for one in read] == ["mlx_kvcache.commands.app", FOR_ALL]


def test_a_circle_is_caught_and_a_fork_is_none() -> None:
    fork = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "d")]
    assert circles(fork) == []
    assert circles([*fork, ("d", "b")]) == [["b", "d"]]
    both = circles([*fork, ("d", "a"), ("x", "y"), ("y", "x")])
    assert both == [["a", "b", "c", "d"], ["x", "y"]]


def test_a_circle_is_explained_by_its_shortest() -> None:
    arrows = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "b"), ("c", "outside")]
    imports = [Import(*arrow, f"{arrow[0]}.py", 7) for arrow in arrows]
    names = {name: name for name in ("a", "b", "c", "outside")}
    (group,) = circles(arrows)
    assert explained(group, imports, names).splitlines() == [
        "  3 in circles with each other: a, b, c; one of them:",
        "    b.py:7: b imports c",
        "    c.py:7: c imports b",
    ]
