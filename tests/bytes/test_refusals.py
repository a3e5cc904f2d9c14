"""Every refused call raises a typed error and changes nothing, not one byte of any pool.

Each bad call is made in every situation in which a cache can be; afterwards the cache goes on
under the oracle as if it had never been called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import (
    CapacityError,
    KVCacheError,
    LayerIndexError,
    PositionError,
    RewindError,
    UpdateDtypeError,
    UpdateShapeError,
)
from tests.support.sequence_oracle import Question, Session, Shape, observe

CAPACITY = 40
SHAPES = [Shape(0, 2, 3, 2), Shape(4, 2, 3, 2), Shape(0, 2, 3, 2), Shape(4, 2, 3, 2)]
Bad = Callable[[MLXSequenceCache, int], object]


def begun(kv_dtype: str | None = None) -> Session:
    return Session(SHAPES, capacity=CAPACITY, spare=3, kv_dtype=kv_dtype)


def flat_only(run: Session) -> None:
    run.step(2)


def decoding(run: Session) -> None:
    run.step(2)
    run.step(1)
    run.step(1)


def wrapped(run: Session) -> None:
    run.step(9)
    for _ in range(6):
        run.step(1, [Question()] * 4)


def rewound(run: Session) -> None:
    wrapped(run)
    run.rewind(13)


def cleared(run: Session) -> None:
    wrapped(run)
    run.clear()


def full(run: Session) -> None:
    run.step(CAPACITY)


def in_a_decode_step(run: Session) -> None:
    """Layers 0 and 1 have written the running step, 2 and 3 have not."""
    wrapped(run)
    run.step(1, [Question()] * 4, [0, 1])


def in_a_wide_step(run: Session) -> None:
    wrapped(run)
    run.step(5, None, [0, 1])


SITUATIONS = [flat_only, decoding, wrapped, rewound, cleared, full]
TORN = [in_a_decode_step, in_a_wide_step]


def arrays(
    count: int = 1,
    *,
    batch: int = 1,
    heads: int = 2,
    key_dim: int = 3,
    value_dim: int = 2,
    dtype: mx.Dtype = mx.float32,
) -> tuple[mx.array, mx.array]:
    keys = mx.ones((batch, heads, count, key_dim)).astype(dtype)
    return keys, mx.ones((batch, heads, count, value_dim)).astype(dtype)


def update(keys: Any, values: Any) -> Bad:
    return lambda cache, layer: cache.layer(layer).update_and_fetch(keys, values)


def attend(keys: Any, values: Any, position: Any) -> Bad:
    return lambda cache, layer: cache.attend(layer, keys, keys, values, 1.0, positions=position)


def mixed(first: tuple[Any, Any], second: tuple[Any, Any]) -> Bad:
    return update(first[0], second[1])


GOOD = arrays()

#: Refused whatever the cache holds.
BAD_CALLS: dict[str, tuple[Bad, Any]] = {
    "no heads": (update(*arrays(heads=0)), UpdateShapeError),
    "too few heads": (update(*arrays(heads=1)), UpdateShapeError),
    "too many heads": (update(*arrays(heads=3)), UpdateShapeError),
    "a narrow key": (update(*arrays(key_dim=2)), UpdateShapeError),
    "a wide key": (update(*arrays(key_dim=4)), UpdateShapeError),
    "a narrow value": (update(*arrays(value_dim=1)), UpdateShapeError),
    "a wide value": (update(*arrays(value_dim=3)), UpdateShapeError),
    "an empty value": (update(*arrays(value_dim=0)), UpdateShapeError),
    "keys and values swapped": (update(GOOD[1], GOOD[0]), UpdateShapeError),
    "heads differ": (mixed(arrays(), arrays(heads=1)), UpdateShapeError),
    "batches differ": (mixed(arrays(), arrays(batch=2)), UpdateShapeError),
    "more values than keys": (mixed(arrays(1), arrays(2)), UpdateShapeError),
    "more keys than values": (mixed(arrays(3), arrays(1)), UpdateShapeError),
    "no tokens": (update(*arrays(0)), UpdateShapeError),
    "no sequences": (update(*arrays(batch=0)), UpdateShapeError),
    "three axes": (update(GOOD[0][0], GOOD[1][0]), UpdateShapeError),
    "five axes": (update(GOOD[0][None], GOOD[1][None]), UpdateShapeError),
    "keys of three axes": (update(GOOD[0][0], GOOD[1]), UpdateShapeError),
    "scalars": (update(mx.array(1.0), mx.array(1.0)), UpdateShapeError),
    "integers": (update(*arrays(dtype=mx.int32)), UpdateDtypeError),
    "bytes": (update(*arrays(dtype=mx.uint8)), UpdateDtypeError),
    "booleans": (update(*arrays(dtype=mx.bool_)), UpdateDtypeError),
    "complex numbers": (update(*arrays(dtype=mx.complex64)), UpdateDtypeError),
    "integer keys": (mixed(arrays(dtype=mx.int32), arrays()), UpdateDtypeError),
    "integer values": (mixed(arrays(), arrays(dtype=mx.int64)), UpdateDtypeError),
    "NumPy arrays": (update(*map(np.array, GOOD)), UpdateDtypeError),
    "too many tokens": (
        update(*arrays(CAPACITY + 1)),
        (CapacityError, PositionError),
    ),
    "an earlier position": (attend(*GOOD, -1), PositionError),
    "a later position": (attend(*GOOD, CAPACITY + 1), PositionError),
    "a position in words": (attend(*GOOD, "next"), PositionError),
    "layer -1": (lambda cache, _: cache.layer(-1).update_and_fetch(*GOOD), LayerIndexError),
    "layer 4": (lambda cache, _: cache.layer(4).update_and_fetch(*GOOD), LayerIndexError),
    "layer True": (lambda cache, _: cache.layer(True).update_and_fetch(*GOOD), LayerIndexError),
    "layer '0'": (lambda cache, _: cache.layer("0").update_and_fetch(*GOOD), LayerIndexError),
    "layer 1.0": (lambda cache, _: cache.layer(1.0).update_and_fetch(*GOOD), LayerIndexError),
    "layer None": (lambda cache, _: cache.layer(None).update_and_fetch(*GOOD), LayerIndexError),
    "the mask of layer -1": (lambda cache, _: cache.layer(-1).make_mask(1), LayerIndexError),
    "the mask of layer 4": (lambda cache, _: cache.layer(4).make_mask(1), LayerIndexError),
    "a mask of no tokens": (lambda cache, layer: cache.layer(layer).make_mask(0), KVCacheError),
    "a mask of -1 tokens": (lambda cache, layer: cache.layer(layer).make_mask(-1), KVCacheError),
    "a mask of 1.5 tokens": (lambda cache, layer: cache.layer(layer).make_mask(1.5), KVCacheError),
    "a mask of window -1": (
        lambda cache, layer: cache.layer(layer).make_mask(3, window_size=-1),
        KVCacheError,
    ),
    "layer() of -1": (lambda cache, _: cache.layer(-1), LayerIndexError),
    "layer() of 4": (lambda cache, _: cache.layer(4), LayerIndexError),
    "a rewind to -1": (lambda cache, _: cache.rewind(-1), RewindError),
    "a rewind beyond": (lambda cache, _: cache.rewind(cache.length + 1), RewindError),
    "a rewind to True": (lambda cache, _: cache.rewind(True), RewindError),
    "a rewind to 0.0": (lambda cache, _: cache.rewind(0.0), RewindError),
    "a rewind to '0'": (lambda cache, _: cache.rewind("0"), RewindError),
    "a rewind to None": (lambda cache, _: cache.rewind(None), RewindError),
    "a reservation beyond": (lambda cache, _: cache.reserve(CAPACITY + 1), CapacityError),
    "a reservation of -1": (lambda cache, _: cache.reserve(-1), KVCacheError),
    "a reservation of 30.5": (lambda cache, _: cache.reserve(30.5), KVCacheError),
    "a reservation of '30'": (lambda cache, _: cache.reserve("30"), KVCacheError),
    "a reservation of None": (lambda cache, _: cache.reserve(None), KVCacheError),
    "stepping back beyond": (
        lambda cache, layer: cache.layers[layer].step_back(cache.length + 1),
        RewindError,
    ),
    "stepping back to -1": (lambda cache, layer: cache.layers[layer].step_back(-1), RewindError),
    "keys of another shape set": (
        lambda cache, layer: setattr(cache.layers[layer], "keys", mx.zeros((1, 2, 1, 3))),
        UpdateShapeError,
    ),
    "values of another dtype set": (
        lambda cache, layer: setattr(
            cache.layers[layer], "values", mx.zeros((1, 2, 64, 2), mx.int32)
        ),
        UpdateShapeError,
    ),
}


def refuse(run: Session, name: str, layer: int, bad: Bad, error: Any) -> None:
    """The call is refused by each cache, with what was asked in the message, and no effect."""
    for cache in run.caches:
        before = observe(cache)
        with pytest.raises(error) as caught:
            bad(cache, layer)
        assert isinstance(caught.value, KVCacheError)
        assert len(str(caught.value)) > 20, "a message that helps nobody"
        assert observe(cache) == before, f"{name} was refused but changed something"


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_changes_nothing(name: str) -> None:
    bad, error = BAD_CALLS[name]
    for situation in SITUATIONS:
        run = begun()
        situation(run)
        run.flush()
        for layer in (0, 1):
            refuse(run, f"{name}, {situation.__name__}", layer, bad, error)
        if run.room:
            run.step(1, [Question()] * 4)
            run.step(3)
            run.flush()
        assert run.rewind(max(0, run.length - 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_in_the_middle_of_a_step_changes_nothing(name: str) -> None:
    bad, error = BAD_CALLS[name]
    for situation in TORN:
        if error is UpdateDtypeError and situation is in_a_decode_step:
            # The dtype is compared in the first layer of a decode step only.
            continue
        run = begun()
        situation(run)
        run.flush()
        for layer in (2, 3):
            refuse(run, f"{name}, {situation.__name__}", layer, bad, error)
        # The step can still be finished by the layers that had not written it.
        count = 1 if situation is in_a_decode_step else 5
        run.step(count, [None, None, None, Question()], [2, 3])
        run.flush()
        run.step(1, [Question()] * 4)
        run.flush()


def test_a_bad_first_call_leaves_the_cache_empty() -> None:
    for name, (bad, error) in BAD_CALLS.items():
        if "set" in name:
            continue
        run = begun()
        refuse(run, name, 0, bad, error)
        assert run.caches[0].nbytes == 0
        run.step(3)
        run.flush()


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("situation", [flat_only, decoding, wrapped, rewound])
def test_another_batch_is_refused_until_a_clear(situation, batch: int, count: int) -> None:
    run = begun()
    situation(run)
    run.flush()
    for layer in (0, 1):
        bad = update(*arrays(count, batch=batch))
        refuse(run, "another batch", layer, bad, UpdateShapeError)
    run.clear()
    run.batch = batch
    run.step(count)
    run.step(1)
    run.flush()


@pytest.mark.parametrize("situation", [wrapped, rewound, full])
def test_a_rewind_below_the_floor_names_what_can_be_reached(situation) -> None:
    run = begun()
    situation(run)
    floor = run.floor()
    assert floor > 1
    for position in range(1, floor):
        assert not run.rewind(position)
        for cache in run.caches:
            with pytest.raises(RewindError, match=f"{floor}"):
                cache.rewind(position)
            with pytest.raises(RewindError, match=f"{floor}"):
                cache.layers[2].step_back(position)
    assert run.rewind(floor)


def test_a_missing_layer_is_refused_when_the_others_went_on() -> None:
    """The message of the repair leads to a repair that works."""
    for count in (1, 2, 3):
        run = begun()
        wrapped(run)
        length = run.length
        run.step(count, None, [0, 1, 3])
        run.flush()
        for tokens in (count + 1, count + 2):
            run.is_refused(2, tokens)
        for cache in run.caches:
            with pytest.raises(RewindError, match=f"{length}"):
                cache.rewind(length + 1)
        assert run.rewind(length)
        run.step(count)
        run.flush()


def test_capacity_is_checked_before_anything_is_written() -> None:
    run = begun()
    run.step(38)
    run.flush()
    for layer in range(4):
        refuse(run, "3 tokens", layer, update(*arrays(3)), CapacityError)
    run.step(2)
    run.flush()
    for layer in range(4):
        refuse(run, "1 token", layer, update(*arrays(1)), CapacityError)
    assert not run.caches[0].can_extend()
    assert run.rewind(39)
    run.step(1)
    run.flush()


def test_rows_cannot_be_read_again_before_there_are_any() -> None:
    run = begun()
    for cache in run.caches:
        with pytest.raises(UpdateShapeError, match="no keys and values"):
            cache.layers[0].keys_and_values()
    run.step(2)
    run.clear()
    for cache in run.caches:
        with pytest.raises(UpdateShapeError, match="no keys and values"):
            cache.layers[0].keys_and_values()
