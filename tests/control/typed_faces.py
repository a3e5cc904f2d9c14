"""Read by mypy in test_faces.py, and never run: which class has which face.

Every line that mypy must refuse carries an ignore for that very error, and strict mode reports an
ignore that was not needed.
"""

from __future__ import annotations

from mlx_kvcache import (
    AttentionBackend,
    Cache,
    CacheSession,
    MLXSequenceCache,
    SequenceControl,
    SequencePlanner,
    SharedControl,
    StepBackend,
    current_cache,
)
from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.control.factory import Builder
from mlx_kvcache.layout import RingLayout, SequenceLayout
from tests.support.plain_cache import PlainCache


def have(sequence: MLXSequenceCache, layout: SequenceLayout) -> None:
    plain: Cache = sequence
    control: SequenceControl = sequence
    backend: AttentionBackend = sequence
    planner: SequencePlanner = layout
    inner: SequencePlanner = sequence.layout
    print(plain, control, backend, planner, inner)


def have_many(cells: MLXCellCache, batched: MLXBatchedSequenceCache) -> None:
    shared: SharedControl = cells
    shared = batched
    backend: AttentionBackend = cells
    backend = batched
    step: StepBackend = cells
    step = batched
    control: SequenceControl = cells  # type: ignore[assignment]
    print(shared, backend, step, control)


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
