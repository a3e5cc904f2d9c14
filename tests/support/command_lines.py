"""Runs a benchmark's command line inside the test's own process."""

from __future__ import annotations

import re
from typing import Any

from typer.testing import CliRunner

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_BOX = re.compile(r"[│╭╮╰╯─]+")


def run_app(app: Any, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed: without colors, a usage error on one line."""
    done = CliRunner().invoke(app, list(options))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    shown = _ESCAPES.sub("", done.output)
    if done.exit_code:
        shown = " ".join(_BOX.sub(" ", shown).split())
    return done.exit_code, shown
