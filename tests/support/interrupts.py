"""Raises KeyboardInterrupt at a chosen line, as Ctrl-C may at any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


class Interrupter:
    """Notes the lines that are run in some files, and interrupts one of them.

    at: which line in the order in which they are run, counted from 0; None for none. lines: those
    that were run, in this order; the last one is the interrupted one.
    """

    def __init__(self, files: Collection[str], at: int | None = None) -> None:
        self.files = files
        self.at = at
        self.lines: list[tuple[str, int]] = []

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` answers, unless a line of it is interrupted."""
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if self.at == len(self.lines) - 1:
                raise KeyboardInterrupt
        return self._trace
