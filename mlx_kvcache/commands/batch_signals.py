"""How `batch` is stopped: between two steps, with what is finished written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stop:
    """Whether the run is to stop, and by which signal."""

    signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note the first SIGINT, SIGTERM or SIGHUP; a second one acts at once, as without this.

    A signal that the process was told to ignore stays ignored.
    """
    stop = Stop()
    before: dict[signal.Signals, Any] = {}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        stop.signal = number
        give_back()

    # Only the main thread hears signals.
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        give_back()
