"""The kinds of histories, and which of them a seed draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from random import Random

from tests.fuzz.history import History

#: By name: how many histories of a hundred, and where the kind is. Models are imported by few.
_KINDS: dict[str, tuple[float, str, str]] = {
    "sequence": (32, "sequence", "SequenceHistory"),
    "cells": (23, "many", "CellHistory"),
    "batched": (15, "many", "BatchedHistory"),
    "prompt_cache": (13, "prompt_cache", "PromptCacheHistory"),
    "layout": (14, "layout", "LayoutHistory"),
    "engine": (2.6, "engine", "EngineHistory"),
    "chat": (0.4, "chat", "ChatHistory"),
}
NAMES = tuple(_KINDS)


@cache
def kind_named(name: str) -> type[History]:
    """The class of a kind."""
    _, module, class_name = _KINDS[name]
    kind: type[History] = getattr(import_module(f"tests.fuzz.{module}"), class_name)
    assert kind.kind == name
    return kind


def kind_of(seed: int, only: Sequence[str]) -> str:
    """The kind of a seed's history: always the same, for the same choice of kinds."""
    shares = [_KINDS[name][0] for name in only]
    return Random(f"kind {seed}").choices(list(only), shares)[0]
