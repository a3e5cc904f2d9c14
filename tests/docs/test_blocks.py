"""Every code block of the README and of the documents runs as it stands.

Demo models are tiny here, under the same names; `test_real_models.py` runs the README on the real
ones.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_kvcache.control.factory import FACTORY
from mlx_kvcache.models.convert import CONVERTER
from mlx_kvcache.models.store import HOME_VARIABLE
from tests.support.document_blocks import DOCUMENTS, ROOT, Block, all_blocks, indented_code
from tests.support.tiny_models_on_disk import config_of, write_model

BLOCKS = all_blocks()
#: What is written by hand and run by nobody: trees, pictures, output.
PLAIN = ("text",)


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the documents name, and the home of two tiny demo models."""
    place = tmp_path_factory.mktemp("reader")
    home = place / "home"
    write_model(home / f"smollm2-v{CONVERTER}", chat=True)
    write_model(home / f"gemma3-270m-v{CONVERTER}", family="gemma3_text")
    for name in ("my-model", "my-llama"):
        write_model(place / name, chat=True)
    (place / "config.json").write_text(json.dumps(config_of("llama")))
    (place / "prompt.txt").write_text("w5 w6 w7\n")
    (place / "questions.txt").write_text("w5 w6 w7\nw5 w6 w8\n")
    (place / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w7", "id": "b"}\n')
    return place


@pytest.mark.slow
@pytest.mark.parametrize("document", sorted({block.document for block in of("python")}), ids=str)
def test_python_blocks_run_one_after_another(
    document: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(place / "home"))
    monkeypatch.chdir(place)
    monkeypatch.setattr(FACTORY, "_builders", dict(FACTORY._builders))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names: dict[str, Any] = {"__name__": "__document__"}
    ran = 0
    for block in of("python"):
        if block.document == document and not is_quoted(block):
            exec(compile(block.text, str(block), "exec"), names)
            ran += 1
    assert ran or document == "docs/model_families.md"


def is_quoted(block: Block) -> bool:
    """Whether a block is a piece of a source file, which the document shows."""
    wanted = squeezed(block.text)
    folders = (ROOT / "mlx_kvcache", ROOT / "tests" / "support", ROOT / "examples")
    return any(
        wanted in squeezed(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in folder.rglob("*.py")
    )


def squeezed(text: str) -> str:
    """A text without what a formatter or a comment may add."""
    return re.sub(r"\s+", "", re.sub(r"#.*", "", text)).replace(",)", ")")


def test_a_changed_quotation_is_noticed() -> None:
    quoted = [block for block in of("python") if is_quoted(block)]
    assert quoted
    for block in quoted:
        changed = Block(block.document, block.line, "python", block.text.replace("(", "(1, ", 1))
        assert changed.text == block.text or not is_quoted(changed)


@pytest.mark.slow
@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_command_lines_work(block: Block, place: Path) -> None:
    lines = [line for line in block.text.splitlines() if line.strip()]
    assert lines
    own = [line for line in lines if "mlx-kvcache " in line]
    for line in lines:
        if line not in own:
            check_other(line)
    if own:
        run_in_shell("\n".join(own), place)


def run_in_shell(script: str, place: Path) -> None:
    """Run lines as a person would, with `mlx-kvcache` on the path, and nothing typed."""
    tools = place / "bin"
    tools.mkdir(exist_ok=True)
    command = tools / "mlx-kvcache"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mlx_kvcache "$@"\n')
    command.chmod(0o755)
    for left in place.glob("results*"):
        left.unlink()
    # A home of its own, since models may be deleted.
    home = place / "own"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(place / "home", home)
    environment = {
        **os.environ,
        HOME_VARIABLE: str(home),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


def check_other(line: str) -> None:
    """See that what a line names is there: targets, tests, scripts and their options."""
    words = [word for word in shlex.split(line, comments=True) if "=" not in word or "-" in word]
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["make", *targets]:
            for target in targets:
                assert f"\n{target}: " in (ROOT / "Makefile").read_text(), line
        case ["pip", "install", "."]:
            assert (ROOT / "pyproject.toml").is_file()
        case [".venv/bin/python" | "python", "-m", "pytest", *arguments] | ["pytest", *arguments]:
            check_tests(arguments, line)
        case [".venv/bin/python", "-m", "tests.fuzz", *options]:
            check_options(["-m", "tests.fuzz"], options, line)
        case [".venv/bin/python" | "python", script, *options]:
            check_options([script], options, line)
        case _:
            pytest.fail(f"nothing knows how to try this line: {line}")


def check_tests(arguments: list[str], line: str) -> None:
    for argument in arguments:
        if argument.startswith("tests"):
            path, _, name = argument.partition("::")
            assert (ROOT / path).exists(), line
            assert not name or f"def {name}(" in (ROOT / path).read_text(), line


def check_options(program: list[str], options: list[str], line: str) -> None:
    wide = {**os.environ, "COLUMNS": "200"}
    told = subprocess.run(
        [sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, env=wide
    )
    assert told.returncode == 0, line
    for option in options:
        if option.startswith("--"):
            assert option.partition("=")[0] in told.stdout, line


@pytest.mark.parametrize("block", of("json", "toml"), ids=str)
def test_data_blocks_can_be_read(block: Block) -> None:
    read: Callable[[str], Any] = json.loads if block.language == "json" else tomllib.loads
    assert read(block.text)


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "sh", "json", "toml", *PLAIN}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_is_fenced_so_that_it_is_found(path: Path) -> None:
    assert indented_code(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
