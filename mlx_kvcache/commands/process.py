"""The process of the command line: how it begins, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from mlx_kvcache.commands.signals import Terminated, hear_nothing_more, hear_signals

_STANDARD_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run_process() -> None:
    """Run the command line with the arguments of the process, and end it."""
    try:
        _open_streams()
        hear_signals()
        from mlx_kvcache.commands.app import main

        main()
    except KeyboardInterrupt:
        _end("interrupted", 128 + signal.SIGINT)
    except Terminated as error:
        _end("terminated", error.status)
    finally:
        # Nothing is left to be broken off but Python's own end, which would tell of it at length.
        hear_nothing_more()


def _end(said: str, status: int) -> None:
    """For a signal that came outside of what the application answers for."""
    hear_nothing_more()
    with suppress(OSError):
        os.write(2, f"{said}\n".encode())
    sys.exit(status)


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
