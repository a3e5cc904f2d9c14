"""Numbers as a person reads them, and the shape of a layer as a program does."""

from __future__ import annotations

from collections import Counter

from mlx_kvcache.facts.geometry import LayerGeometry
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.sequence import SequenceLayout

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1: 1536 is "1.5 KiB"."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    unit = 0
    # 1023.95 would be shown as 1024.0.
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.1f} {_UNITS[unit]}"


def rate_text(rate: float | None) -> str:
    """Tokens per second; a dash where there was nothing to measure."""
    return "- tokens/s" if rate is None else f"{rate:.1f} tokens/s"


def ranges_text(numbers: tuple[int, ...]) -> str:
    """Ascending numbers as ranges: "0-4, 6-10". A regular series of four or more is cut short.

    "0-4, 6-10, ... 54-58" repeats what its first two terms show up to the last.
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    tail = len(runs) - _regular(runs)
    # The last run of a pattern is often cut off by the end of the model, so the series may end
    # one run before it.
    if len(runs) - tail < 4:
        return ", ".join(texts)
    return ", ".join([*texts[:2], f"... {texts[-1 - tail]}", *texts[len(texts) - tail :]])


def ring_facts(layout: SequenceLayout) -> list[dict[str, int]]:
    """For each window: its cache layers, their slots, and how often their rings wrapped."""
    counts = Counter(each for each in layout.layers if isinstance(each, RingLayout))
    return [
        {
            "window": ring.window,
            "layers": count,
            "slots": ring.size,
            "wraps": ring_wraps(ring, layout.high_water),
        }
        for ring, count in sorted(counts.items(), key=lambda pair: pair[0].window)
    ]


def rings_text(layout: SequenceLayout) -> str:
    """How often the rings wrapped: "ring(8) wrapped 3 times"; empty where there are none."""
    return ", ".join(
        f"ring({facts['window']}) {wraps_text(facts['wraps'])}" for facts in ring_facts(layout)
    )


def ring_wraps(ring: RingLayout, high_water: int) -> int:
    """How often a row went into the ring's first slot again, given the highest end written."""
    return max(0, high_water - 1) // ring.size


def wraps_text(wraps: int) -> str:
    """Wraps in words, as what a ring did."""
    if not wraps:
        return "has not wrapped"
    return "wrapped once" if wraps == 1 else f"wrapped {wraps} times"


def layer_facts(layer: LayerGeometry) -> dict[str, int]:
    """The window (0: flat) and the shape of the rows of a cache layer."""
    return {
        "window": layer.policy.window,
        "kv_heads": layer.kv_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
    }


def _regular(runs: list[tuple[int, int]]) -> int:
    """How many of the leading runs have one length and one distance."""
    count = min(len(runs), 2)
    while count < len(runs):
        before, last, this = runs[count - 2], runs[count - 1], runs[count]
        if (this[0] - last[0], this[1] - last[1]) != (last[0] - before[0], last[1] - before[1]):
            break
        if before[1] - before[0] != last[1] - last[0]:
            break
        count += 1
    return count
