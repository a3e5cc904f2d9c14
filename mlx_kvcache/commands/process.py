"""The process of the command line: its streams, and the signals that end it."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

#: Signals that end a process without a word unless it hears them.
_ENDING = ("SIGTERM", "SIGHUP")
_STANDARD_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class Terminated(BaseException):
    """A signal asked the process to end. Raised wherever it is, so that it ends in order.

    status: the exit status, as a shell tells of a process that a signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def run_process() -> None:
    """Run the command line with the arguments of the process, and end it."""
    try:
        _open_streams()
        _hear_signals()
        from mlx_kvcache.commands.app import main

        main()
    except KeyboardInterrupt:
        _end("interrupted", 128 + signal.SIGINT)
    except Terminated as error:
        _end("terminated", error.status)
    finally:
        # Nothing is left to be broken off but Python's own end, which would tell of it at length.
        _hear_nothing_more()


def _end(said: str, status: int) -> None:
    """For a signal that came outside of what the application answers for."""
    _hear_nothing_more()
    with suppress(OSError):
        os.write(2, f"{said}\n".encode())
    sys.exit(status)


def _hear_signals() -> None:
    """Let the signals that end a process raise `Terminated`; a second one acts at once.

    One that the process was told to ignore (nohup) stays ignored.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(number)

    for name in _ENDING:
        number: Any = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _hear_nothing_more() -> None:
    for name in ("SIGINT", *_ENDING):
        number: Any = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def _open_streams() -> None:
    """Give the process three standard streams, also where it was started without one.

    A file opened later would get a closed stream's number, and be taken for it. Reading and
    writing fail, as they should, where there is nothing to read from or to write to.
    """
    for number, (name, mode) in enumerate(_STANDARD_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
