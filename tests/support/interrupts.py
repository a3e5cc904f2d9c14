"""Raises KeyboardInterrupt at a chosen line, as Ctrl-C may at any."""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx_kvcache

PACKAGE = str(Path(mlx_kvcache.__file__).parent) + os.sep


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


class Fuse:
    """Interrupts the package once, at a point that is counted from the call on.

    A point is where CPython looks for a signal: a line that begins, or a call within it that has
    just returned. at: which of those that are passed, counted from 0. handler: what a signal does
    there. place: file and line of the interrupt, None as long as the point was not reached.
    """

    def __init__(
        self, at: int, handler: Callable[[int, FrameType], Any] = signal.default_int_handler
    ) -> None:
        self.at = at
        self.handler = handler
        self.place: tuple[str, int] | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` answers, unless the point is reached before."""
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _: object) -> Any:
        code = frame.f_code
        # A module that is imported for the first time runs once, in one process only.
        if not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return None
        frame.f_trace_opcodes = True
        return self._pass

    def _pass(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" or (event == "opcode" and frame.f_lasti in _after_calls(frame.f_code)):
            if self.at == 0:
                self.place = frame.f_code.co_filename[len(PACKAGE) :], frame.f_lineno
                sys.settrace(None)
                self.handler(signal.SIGINT, frame)
            self.at -= 1
        return self._pass


@cache
def _after_calls(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions that follow a call."""
    following = set()
    was_call = False
    for instruction in dis.get_instructions(code):
        if was_call:
            following.add(instruction.offset)
        was_call = instruction.opname.startswith("CALL")
    return frozenset(following)
