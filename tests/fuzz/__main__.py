"""`python -m tests.fuzz`: random histories with interrupts, each by its seed."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from tests.fuzz.kinds import NAMES, kind_named
from tests.fuzz.pool import Failure, Pool, Totals
from tests.fuzz.run import run_history

#: A kind that ran so often and did not meet what it should has shown nothing.
ENOUGH = 1500
#: So many failures end a run: they have one cause, or the cache is broken throughout.
MOST_FAILURES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, sum up, and answer the exit status: 1 when anything differs."""
    chosen = _parser().parse_args(arguments)
    only = chosen.only.split(",")
    unknown = [kind for kind in only if kind not in NAMES]
    if unknown:
        print(f"unknown kinds {unknown}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    if chosen.skip is not None:
        skip = [int(number) for number in chosen.skip.split(",") if number]
        return _alone(only[0], chosen.seed, skip)
    began = time.monotonic()
    print(
        f"{chosen.histories} histories of {', '.join(only)}, seeds {chosen.seed} to "
        f"{chosen.seed + chosen.histories - 1}, at most {chosen.seconds:.0f} s, "
        f"{chosen.workers} workers",
        flush=True,
    )
    pool = Pool(chosen.seed, chosen.histories, only, chosen.workers)
    ended = _watch(pool, began, chosen)
    seconds = time.monotonic() - began
    failed = _sum_up(pool.totals, seconds, ended)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3000.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--only", default=",".join(NAMES), help="kinds, with commas between")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument(
        "--skip", help="run the one history of --seed without the verbs of these numbers"
    )
    return parser


def _alone(kind: str, seed: int, skip: Sequence[int]) -> int:
    """One history in this process, told verb by verb."""
    result = run_history(kind, seed, skip)
    print("\n".join(result.told))
    print(result.failure or "no difference")
    return 1 if result.failure else 0


def _watch(pool: Pool, began: float, chosen: argparse.Namespace) -> str:
    """Show the progress; why the run ended before its time, if it did."""
    shown = told = 0
    is_terminal = sys.stdout.isatty()
    why = ""
    try:
        while pool.wait(0.5):
            seconds = time.monotonic() - began
            totals = pool.totals
            for failure in totals.failures[told:]:
                _tell(failure, chosen.only)
                told += 1
            if seconds > chosen.seconds:
                why = f"the {chosen.seconds:.0f} seconds were over"
            if told >= MOST_FAILURES:
                why = f"{told} failures"
            if why:
                break
            if is_terminal or seconds - shown > 60:
                shown = int(seconds)
                line = (
                    f"{totals.done} of {chosen.histories} histories, {seconds:.0f} s, "
                    f"{totals.done / seconds:.1f}/s, {len(totals.failures)} failures"
                )
                print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        why = "interrupted"
    pool.stop()
    for failure in pool.totals.failures[told:]:
        _tell(failure, chosen.only)
    return why


def _tell(failure: Failure, only: str) -> None:
    """Print what failed, and how to see it again."""
    kinds = failure.kind or only
    print(f"\nFAILED seed {failure.seed} {failure.kind}: {failure.what}")
    for verb in failure.told:
        print(f"  {verb}")
    print(failure.trace)
    again = f"python -m tests.fuzz --seed {failure.seed} --histories {failure.count} --only {kinds}"
    print(f"again: {again}")
    if failure.skip:
        print(f"shorter: {again} --skip {','.join(map(str, failure.skip))}")
    sys.stdout.flush()


def _sum_up(totals: Totals, seconds: float, ended: str) -> bool:
    """Print what was run and met; whether anything is wrong with it."""
    print(f"\n{totals.done} histories in {seconds:.0f} s ({totals.done / seconds:.1f}/s)", end="")
    print(f", ended since {ended}" if ended else "")
    missing = []
    for kind, met in totals.met.items():
        histories, verbs = met["histories"], met["verbs"]
        print(f"  {kind}: {histories} histories, {verbs} verbs, {met['interrupts']} interrupts")
        others = sorted(met.items() - {("histories", histories), ("verbs", verbs)})
        print("    " + ", ".join(f"{what} {count}" for what, count in others))
        if histories >= ENOUGH:
            missing += [f"{kind}: {what}" for what in kind_named(kind).must_meet if not met[what]]
    for what in missing:
        print(f"NEVER MET {what}")
    nothing = not totals.done
    count = len(totals.failures)
    print(f"{count} failures" if count else "no difference, no leak, no crash")
    if nothing:
        print("nothing was run")
    return bool(count or missing or nothing)


if __name__ == "__main__":
    # A run in the background is ended by it, and sums up too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
