"""A program in a pseudo-terminal: what is typed into it, and what it shows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

import pexpect

from tests.support.processes import hear_ctrl_c

#: How far the cursor is moved to the right, as it is over spaces.
RIGHT = re.compile(r"\x1b\[([0-9]*)C")
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])|\r")


class Terminal:
    """A running program. `close` ends it, whatever it does."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.child = pexpect.spawn(
            command[0],
            list(command[1:]),
            # Nobody answers here where the cursor is.
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            dimensions=(24, 100),
            encoding="utf-8",
            codec_errors="replace",
            preexec_fn=hear_ctrl_c,
        )
        self.child.delaybeforesend = None
        self.shown = ""

    def type(self, text: str) -> None:
        self.child.send(text)

    def paste(self, text: str) -> None:
        """Type as a terminal does that marks a paste."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """What was shown up to `text`, which must come, without colors and cursor movements."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            try:
                part = self.child.read_nonblocking(65536, max(0, end - time.monotonic()))
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise AssertionError(f"{text!r} did not come; shown: {self.shown!r}") from error
            spaced = RIGHT.sub(lambda found: " " * int(found[1] or 1), self.shown + part)
            self.shown = ESCAPES.sub("", spaced)
        before, _, self.shown = self.shown.partition(text)
        return before

    def press_ctrl_c(self) -> None:
        # One that comes before the program waits for a key would hit what runs before.
        time.sleep(0.3)
        self.type("\x03")

    def resize(self, rows: int, columns: int) -> None:
        self.child.setwinsize(rows, columns)

    def end(self) -> int | None:
        """The exit status, once the program has ended by itself."""
        self.child.expect(pexpect.EOF, timeout=30)
        self.child.close()
        status: int | None = self.child.exitstatus
        return status

    def close(self) -> None:
        self.child.close(force=True)
