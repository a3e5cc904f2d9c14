"""The command, and pieces of Python, as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "mlx_kvcache"]

_FORBID = """
import sys

FORBIDDEN = {"mlx", "numpy", "mlx_lm", "transformers"}

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError("forbidden here: " + name)

sys.meta_path.insert(0, Forbid())
"""


def hear_ctrl_c() -> None:
    """For `preexec_fn`: what a shell starts in the background does not hear Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: Any, **streams: Any) -> subprocess.Popen[Any]:
    """Start `mlx-kvcache` with these arguments; it hears Ctrl-C, and is killed after 90 s."""
    choices = {"text": True, "stdin": subprocess.DEVNULL, "preexec_fn": hear_ctrl_c, **streams}
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], **choices)
    # Whatever it does not hear must not keep a test waiting.
    watch = threading.Timer(90, process.kill)
    watch.daemon = True
    watch.start()
    return process


def finish(process: subprocess.Popen[Any], rest: Any = None, seconds: float = 60) -> Any:
    """What the process wrote; it is killed, and the test fails, when it does not end."""
    try:
        return process.communicate(rest, timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of Python in the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_without_mlx(code: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of Python where the names in its `FORBIDDEN` cannot be imported."""
    return run_python(_FORBID + code)
