"""The names at the top of the package: whole, lazy where they need MLX, and those that docs use."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_kvcache
from mlx_kvcache import errors

ROOT = Path(__file__).parents[2]
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
USERS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]

FROM_IMPORT = re.compile(
    r"^\s*from (mlx_kvcache[\w.]*) import (?:\(([^)]*)\)|([^\n(]*))", re.MULTILINE
)
ALIAS = re.compile(r"^\s*import mlx_kvcache as (\w+)", re.MULTILINE)


def used(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a text takes from the package."""
    for module, in_brackets, bare in FROM_IMPORT.findall(text):
        for part in re.sub(r"#.*", "", in_brackets or bare).split(","):
            if part.strip():
                yield module, part.split()[0]
    for alias in ALIAS.findall(text):
        for name in re.findall(rf"\b{alias}\.([A-Za-z_]\w*)", text):
            yield "mlx_kvcache", name


def missing(text: str) -> set[tuple[str, str]]:
    """What of it the package does not offer."""
    found = set()
    for module, name in used(text):
        try:
            offered = hasattr(importlib.import_module(module), name)
            if module == "mlx_kvcache":
                offered = name in mlx_kvcache.__all__ or (ROOT / "mlx_kvcache" / name).is_dir()
        except ImportError:
            offered = False
        if not offered:
            found.add((module, name))
    return found


def test_every_name_can_be_had_and_is_shown() -> None:
    assert len(set(mlx_kvcache.__all__)) == len(mlx_kvcache.__all__)
    shown = dir(mlx_kvcache)
    for name in mlx_kvcache.__all__:
        assert getattr(mlx_kvcache, name) is not None
        assert name in shown
    assert {"Engine", "KVCacheError", "PromptCache", "make_prompt_cache"} <= set(shown)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mlx_kvcache' has no attribute 'Unheard'"):
        mlx_kvcache.Unheard  # noqa: B018


@pytest.mark.parametrize("file", [*SHOWN, *USERS], ids=lambda file: file.name)
def test_what_is_shown_is_exported(file: Path) -> None:
    assert missing(file.read_text(encoding="utf-8")) == set()


def test_the_search_sees_what_is_used_and_what_is_missing() -> None:
    everything = {each for file in SHOWN for each in used(file.read_text(encoding="utf-8"))}
    assert ("mlx_kvcache", "make_prompt_cache") in everything
    assert ("mlx_kvcache", "CacheSession") in everything
    assert ("mlx_kvcache.engine", "Engine") in everything
    listed = "from mlx_kvcache import (\n    Engine,  # one\n    Nothing,\n)\n"
    text = f"{listed}import mlx_kvcache as k\nk.gone(1)\n"
    assert missing(text) == {("mlx_kvcache", "Nothing"), ("mlx_kvcache", "gone")}
    assert missing("from mlx_kvcache.nowhere import x") == {("mlx_kvcache.nowhere", "x")}


def test_every_error_can_be_caught_by_the_base_at_the_top() -> None:
    raised = [
        each
        for name, each in vars(errors).items()
        if isinstance(each, type) and not name.startswith("_")
    ]
    assert len(raised) > 20
    for error in raised:
        assert issubclass(error, mlx_kvcache.KVCacheError)
        assert error is mlx_kvcache.KVCacheError or len(error.__mro__) > 4, "also a built-in"


LAZY = """
import sys, mlx_kvcache
assert "Engine" in dir(mlx_kvcache)
mlx_kvcache.KVCacheError, mlx_kvcache.CacheSession
print("mlx.core" in sys.modules, end=" ")
mlx_kvcache.Engine
print("mlx.core" in sys.modules)
"""


@pytest.mark.slow
def test_mlx_is_imported_by_the_names_that_need_it_and_not_before() -> None:
    run = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False", "True"]


def test_the_former_geometry_module_still_serves_and_says_where_it_went() -> None:
    sys.modules.pop("mlx_kvcache.geometry", None)
    with pytest.warns(DeprecationWarning, match="import its names from mlx_kvcache") as warned:
        former = importlib.import_module("mlx_kvcache.geometry")
    assert len(warned) == 1
    for name in former.__all__:
        assert getattr(former, name) is getattr(mlx_kvcache, name)
    assert {"CacheGeometry", "LayerGeometry", "LayerPolicy", "ModelLayer"} == set(former.__all__)
