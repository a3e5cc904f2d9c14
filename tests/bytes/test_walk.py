"""A seeded walk through the oracle's checks, and the faults that it must catch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache import step
from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.layout import RingLayout, Run
from mlx_kvcache.layout import ring as ring_module
from mlx_kvcache.store import rows as store
from mlx_kvcache.store.rows import DenseRows, RowView
from tests.support.sequence_oracle import Question, Session, Shape


def walk(seed: int, kv_dtype: str | None = None) -> None:
    """Steps, rewinds and masks on a few layers; each answer is checked."""
    choose = random.Random(seed)
    windows = [0, 5, choose.choice([2, 3, 8])]
    shapes = [Shape(window, key_dim=3) for window in windows]
    session = Session(shapes, spare=choose.choice([2, 3, 4]), kv_dtype=kv_dtype, seed=seed)
    for _ in range(25):
        if choose.random() < 0.75:
            count = choose.choice([1, 1, 1, 2, 3, 5, 14])
            ask = [
                choose.choice([None, Question(choose.choice([None, None, 2, 4]))]) for _ in windows
            ]
            session.step(count, ask)
            session.flush()
        else:
            session.rewind(choose.randint(max(0, session.length - 4), session.length))


def walks(kv_dtype: str | None = None) -> None:
    for seed in range(6):
        walk(seed, kv_dtype)


@pytest.mark.parametrize("kv_dtype", [None, "bfloat16", "float16"])
def test_walk_holds(kv_dtype: str | None) -> None:
    walks(kv_dtype)


def _band_wider(query, queries, row, rows, window):
    return original_band(query, queries, row, rows, window + 1 if window else 0)


def _band_one_row_late(query, queries, row, rows, window):
    return original_band(query, queries, row + 1, rows, window)


original_read_again = SequenceLayer.read_again
original_band = step.band
original_ring_band = step.ring_band
original_template = step.ring_template
original_wrap = ring_module.wrap
original_rows = store.with_rows


def _template_shifted(size, window):
    return np.roll(original_template(size, window), 1, axis=1)


def _rows_lost(array, rows):
    return mx.zeros_like(original_rows(array, rows)) if rows > array.shape[2] else array


def _write_moved(array, rows, start):
    moved = (start + 1) % array.shape[2]
    if isinstance(start, mx.array):
        moved = mx.minimum(start + 1, array.shape[2] - rows.shape[2])
        return mx.slice_update(array, rows, moved, (2,))
    return array


def _newest_row_missing(self):
    view = original_read_again(self)
    *others, (start, length) = view.runs
    return view._replace(runs=(*others, Run(start, length - 1)))


def _view(keys, values):
    return RowView(keys, values, (Run(0, keys.shape[2]),))


def _read_before_unrounded(self, runs, keys, values):
    old = self.read(runs).dense() if runs else (keys[:, :, :0], values[:, :, :0])
    return _view(mx.concatenate([old[0], keys], 2), mx.concatenate([old[1], values], 2))


def _newest_first(self, runs, keys, values):
    old = self.read(runs).dense() if runs else (keys[:, :, :0], values[:, :, :0])
    return _view(mx.concatenate([keys, old[0]], 2), mx.concatenate([values, old[1]], 2))


FAULTS: dict[str, tuple[Any, str, Callable[..., Any] | property]] = {
    "the floor is length - window": (
        RingLayout,
        "rewind_floor",
        lambda self, high_water: max(0, high_water - self.window),
    ),
    "the floor is one too low": (
        RingLayout,
        "rewind_floor",
        lambda self, high: 0 if high <= self.size else high - self.spare - 1,
    ),
    "band: the window is one too wide": (step, "band", _band_wider),
    "band: rows are one late": (step, "band", _band_one_row_late),
    "ring_template: the window is one too wide": (
        step,
        "ring_template",
        lambda size, window: original_template(size, window + 1),
    ),
    "ring_template: shifted by a slot": (step, "ring_template", _template_shifted),
    "ring_band: the window is one too narrow": (
        step,
        "ring_band",
        lambda query, count, size, window: original_ring_band(query, count, size, window - 1),
    ),
    "ring_band: a position late": (
        step,
        "ring_band",
        lambda query, count, size, window: original_ring_band(query + 1, count, size, window),
    ),
    "rows are read a slot late": (
        ring_module,
        "wrap",
        lambda start, length, size: original_wrap(start + 1, length, size),
    ),
    "growth loses the old rows": (store, "with_rows", _rows_lost),
    "joined rows come back newest first": (DenseRows, "read_before", _newest_first),
    "the newest row is missing when rows are read again": (
        SequenceLayer,
        "read_again",
        _newest_row_missing,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_walk_catches_a_planted_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    with pytest.raises(AssertionError):
        walks()


def test_walk_catches_rows_that_skip_the_storage_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseRows, "read_before", _read_before_unrounded)
    walk(0, None)
    with pytest.raises(AssertionError):
        walks("bfloat16")


def test_walk_catches_a_row_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "write_rows", _write_moved)
    with pytest.raises(AssertionError):
        walks()
