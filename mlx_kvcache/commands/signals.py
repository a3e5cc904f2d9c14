"""The signals that end the process of the command line."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

#: Signals that end a process without a word unless it hears them.
_ENDING = ("SIGTERM", "SIGHUP")
#: Seconds until a signal that was lost is heard again.
_AGAIN = 0.02


class Terminated(BaseException):
    """A signal asked the process to end. Raised wherever it is, so that it ends in order.

    status: the exit status, as a shell tells of a process that a signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def hear_signals() -> None:
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
    _hear_again_what_is_lost()


def hear_nothing_more() -> None:
    """Ignore Ctrl-C and the like from here on: there is nothing left to break off."""
    for name in ("SIGINT", "SIGALRM", *_ENDING):
        number: Any = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def _hear_again_what_is_lost() -> None:
    """Raise once more what Python drops where nobody can catch it: in a `__del__`, or a callback.

    Imports have such places, and a signal may come there.
    """
    usual = sys.unraisablehook
    lost: list[BaseException] = []

    def note(what: Any) -> None:
        if not isinstance(what.exc_value, (KeyboardInterrupt, Terminated)):
            usual(what)
            return
        lost.append(what.exc_value)
        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    def again(_number: int, _frame: FrameType | None) -> None:
        raise lost[-1].with_traceback(None)

    if hasattr(signal, "SIGALRM"):
        sys.unraisablehook = note
