"""`--help`: grouped by theme, whole at any width, and there before MLX is."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
import typer
from typer.core import TyperGroup

from mlx_kvcache.commands.app import app
from mlx_kvcache.commands.flags import PANELS
from tests.support.processes import run_python

ROOT: TyperGroup = typer.main.get_command(app)
COMMANDS = sorted(ROOT.commands)
_BOX = re.compile(r"[│╭╮╰╯─]")


@pytest.fixture
def help_of(run, monkeypatch):
    """The help of a command at a width, and its words without boxes."""

    def shown(command: str, columns: int) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        result = run(*([command] if command else []), "--help")
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        return result.stdout, " ".join(_BOX.sub(" ", result.stdout).split())

    return shown


def parameters(command: str):
    return ROOT.commands[command].params


@pytest.mark.parametrize("columns", [40, 71, 72, 100, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut_at_any_width(help_of, command, columns):
    text, spoken = help_of(command, columns)
    assert max(map(len, text.splitlines())) <= columns
    if columns not in (40, 200):
        return
    assert "…" not in spoken
    for parameter in parameters(command):
        for name in parameter.opts:
            assert name in spoken or name == parameter.name, name


@pytest.mark.parametrize("columns", [40, 100])
def test_options_stand_in_panels_by_theme(help_of, columns):
    text, _ = help_of("generate", columns)
    places = [re.search(rf"^(╭─ {panel} ─|{panel}:$)", text, re.MULTILINE) for panel in PANELS]
    assert None not in places
    starts = [place.start() for place in places]
    assert starts == sorted(starts)
    ends = [*starts[1:], len(text)]
    parts = {panel: text[start:end] for panel, start, end in zip(PANELS, starts, ends, strict=True)}
    for panel, names in {
        "Model": ("--model", "--adapter-path"),
        "Prompt": ("--system", "--file"),
        "Answer": ("--stop", "--max-tokens"),
        "Sampling": ("--temp", "--seed"),
        "Cache": ("--spare", "--windows"),
        "Output": ("--json", "--quiet"),
    }.items():
        for name in names:
            assert f"{name} " in parts[panel].replace(",", " "), (panel, name)


@pytest.mark.parametrize("columns", [40, 100])
def test_the_root_tells_commands_and_exit_statuses(help_of, columns):
    _, spoken = help_of("", columns)
    for said in ("0 done", "1 the system failed", "2 a wrong request", "130 Ctrl-C", "143 SIGTERM"):
        assert said in spoken
    for command in (*COMMANDS, "--install-completion", "--show-completion"):
        assert command in spoken


def test_every_option_has_a_help_text():
    for command in COMMANDS:
        for parameter in parameters(command):
            assert getattr(parameter, "help", None), (command, parameter.name)


def test_aliases_are_options_of_their_own(help_of):
    _, spoken = help_of("generate", 200)
    for alias in (
        "--prompt", "--system-prompt", "--max-kv-size", "--prefill-step-size",
        "--ignore-chat-template", "--chat-template-config",
    ):  # fmt: skip
        assert alias in spoken
    for said in ("no old position is overwritten", "[default: smollm2]", "[default: 256]"):
        assert said in spoken


@pytest.mark.slow
def test_help_and_completion_do_not_wait_for_mlx():
    code = (
        "import os, sys\n"
        "from mlx_kvcache.commands.app import app\n"
        f"for arguments in ([], *([name] for name in {COMMANDS!r})):\n"
        "    assert app([*arguments, '--help'], standalone_mode=False) == 0\n"
        "os.environ.update(_MK_COMPLETE='complete_bash', COMP_WORDS='mk gen', COMP_CWORD='1')\n"
        "try:\n"
        "    app([], prog_name='mk', complete_var='_MK_COMPLETE')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "generate"
    assert result.stdout.count("Examples:") == 1 + len(COMMANDS)


def test_the_docs_name_every_option_of_generate():
    text = (import_module("tests.support.processes").ROOT / "docs/command_line.md").read_text()
    for parameter in parameters("generate"):
        names = [name for name in parameter.opts if name.startswith("--")]
        assert not names or any(
            f"`{name}`" in text or name.endswith("-context-size") for name in names
        ), names
