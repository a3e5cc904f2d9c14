"""Read by mypy in test_faces.py, and never run: which class has which face.

Every line that mypy must refuse carries an ignore for that very error, and strict mode reports an
ignore that was not needed.
"""

from __future__ import annotations

from mlx_kvcache import (
    AttentionBackend,
    AttentionLayer,
    Cache,
    CacheSession,
    MLXSequenceCache,
    SequenceControl,
    SequencePlanner,
    current_cache,
)
from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.control.factory import Builder
from mlx_kvcache.layout import RingLayout, SequenceLayout
from tests.support.plain_cache import PlainCache


def have(sequence: MLXSequenceCache, layer: SequenceLayer, layout: SequenceLayout) -> None:
    plain: Cache = sequence
    control: SequenceControl = sequence
    backend: AttentionBackend = sequence
    one_layer: AttentionLayer = layer
    planner: SequencePlanner = layout
    inner: SequencePlanner = sequence.layout
    print(plain, control, backend, one_layer, planner, inner)


def have_not(sequence: MLXSequenceCache, layout: SequenceLayout, fake: PlainCache) -> None:
    plain: Cache = layout  # type: ignore[assignment]
    control: SequenceControl = layout  # type: ignore[assignment]
    control = fake  # type: ignore[assignment]
    backend: AttentionBackend = layout  # type: ignore[assignment]
    planner: SequencePlanner = sequence  # type: ignore[assignment]
    planner = RingLayout(4, 2)  # type: ignore[assignment]
    print(plain, control, backend, planner)


def build() -> None:
    builder: Builder = MLXSequenceCache
    builder = PlainCache
    builder = SequenceLayout  # type: ignore[assignment]
    print(builder)


def use(session: CacheSession) -> int:
    session.cache.rewind(0)  # type: ignore[attr-defined]
    current_cache().clear()  # type: ignore[attr-defined]
    session.control.clear()
    with session as entered:
        entered.control.rewind(0)
    return session.control.length
