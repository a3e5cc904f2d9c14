"""The kinds of histories, and which of them a seed draws."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz.chat import ChatHistory
from tests.fuzz.engine import EngineHistory
from tests.fuzz.history import History
from tests.fuzz.layout import LayoutHistory
from tests.fuzz.many import BatchedHistory, CellHistory
from tests.fuzz.prompt_cache import PromptCacheHistory
from tests.fuzz.sequence import SequenceHistory

#: How many histories of a hundred are of each kind.
SHARES: dict[type[History], float] = {
    SequenceHistory: 32,
    CellHistory: 23,
    BatchedHistory: 15,
    PromptCacheHistory: 13,
    LayoutHistory: 14,
    EngineHistory: 2.6,
    ChatHistory: 0.4,
}
KINDS: dict[str, type[History]] = {kind.kind: kind for kind in SHARES}


def kind_of(seed: int, only: Sequence[str]) -> str:
    """The kind of a seed's history: always the same, for the same choice of kinds."""
    shares = [SHARES[KINDS[name]] for name in only]
    return Random(f"kind {seed}").choices(list(only), shares)[0]
