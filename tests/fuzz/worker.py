"""A process that runs the histories that it is told to, and tells which one it runs."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections import Counter
from typing import Any

from tests.fuzz.kinds import kind_named
from tests.fuzz.run import Leaks, prepared, run_history, seeds_of, shrunk


def main() -> None:
    """Lines of JSON: [first seed, number of histories] come in; seeds, failures, counts go out."""
    faulthandler.enable()
    only = sys.argv[1].split(",")
    leaks = Leaks()
    with prepared(only):
        for line in sys.stdin:
            first, count = json.loads(line)
            _run(first, count, only, leaks)


def _run(first: int, count: int, only: list[str], leaks: Leaks) -> None:
    compiled = 0
    met: dict[str, Counter[str]] = {kind: Counter() for kind in only}
    for kind, seed in seeds_of(first, count, only):
        _say(begin=seed)
        result = run_history(kind, seed)
        compiled = max(compiled, kind_named(kind).compiled_bytes)
        met[kind].update(result.met)
        met[kind]["histories"] += 1
        met[kind]["verbs"] += max(0, len(result.told) - 1)
        if result.failure is not None:
            result, skip = shrunk(result)
            _say(
                failed=kind, seed=seed, told=result.told, skip=skip, trace=result.failure,
                error=result.error,
            )  # fmt: skip
    found = leaks.found(compiled)
    if found is not None:
        _say(leaked=found, first=first, last=first + count - 1)
    _say(done=count, met=met)


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
