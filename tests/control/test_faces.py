"""The faces: who has which, for mypy and at run time, and that having one means keeping it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache import MLXBatchedSequenceCache, MLXCellCache, MLXSequenceCache
from mlx_kvcache.control import protocols as faces
from mlx_kvcache.errors import CapacityError, KVCacheError, RewindError
from mlx_kvcache.layout import SequenceLayout
from tests.support.plain_cache import CONFIG, GEOMETRY, plain

ROOT = Path(__file__).parents[2]
ALL = (
    faces.Cache,
    faces.SequenceControl,
    faces.SequencePlanner,
    faces.AttentionBackend,
    faces.SharedControl,
    faces.StepBackend,
)


def cache() -> MLXSequenceCache:
    return MLXSequenceCache(GEOMETRY, CONFIG)


def faces_of(thing: object) -> set[str]:
    return {face.__name__ for face in ALL if isinstance(thing, face)}


def test_who_has_which_face() -> None:
    policies = [layer.policy for layer in GEOMETRY.layers]
    assert faces_of(cache()) == {"Cache", "SequenceControl", "AttentionBackend"}
    for many in (MLXCellCache(GEOMETRY, CONFIG), MLXBatchedSequenceCache(GEOMETRY, CONFIG)):
        assert faces_of(many) == {"Cache", "SharedControl", "AttentionBackend", "StepBackend"}
    assert faces_of(cache().layout) == {"SequencePlanner"}
    assert faces_of(SequenceLayout(policies, 8, 2)) == {"SequencePlanner"}
    assert faces_of(plain()) == {"Cache"}
    assert faces_of(object()) == set()


def members(face: Any) -> Iterator[str]:
    for base in face.__mro__[:-1]:
        if getattr(base, "_is_protocol", False):
            yield from (name for name in vars(base) if not name.startswith("_"))


def of_calls(face: Any) -> list[str]:
    return [name for name in members(face) if inspect.isfunction(getattr(face, name))]


OWNERS = [
    (faces.Cache, cache()),
    (faces.SequenceControl, cache()),
    (faces.AttentionBackend, cache()),
    (faces.SharedControl, MLXCellCache(GEOMETRY, CONFIG)),
    (faces.StepBackend, MLXBatchedSequenceCache(GEOMETRY, CONFIG)),
    (faces.SequencePlanner, cache().layout),
]


@pytest.mark.parametrize(("face", "thing"), OWNERS)
def test_isinstance_asks_for_every_member(face: Any, thing: object) -> None:
    wanted = set(members(face))
    assert wanted
    assert all(hasattr(thing, name) for name in wanted)
    for missing in wanted:
        partial = type("Partial", (), dict.fromkeys(wanted - {missing}, 0))()
        assert not isinstance(partial, face)
    assert isinstance(type("Whole", (), dict.fromkeys(wanted, 0))(), face)


@pytest.mark.parametrize(("face", "thing"), OWNERS[1:])
def test_the_parameters_have_the_names_and_the_defaults_of_the_face(
    face: Any, thing: object
) -> None:
    assert of_calls(face)
    for name in of_calls(face):
        asked = inspect.signature(getattr(face, name)).parameters
        given = inspect.signature(getattr(type(thing), name)).parameters
        assert [(each.name, each.default) for each in asked.values()] == [
            (each.name, each.default) for each in given.values()
        ], name


@pytest.mark.slow
def test_mypy_agrees_on_who_has_which_face() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "-m", "tests.control.typed_faces"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in 1 source file" in done.stdout


def rows(cache: MLXSequenceCache) -> list[list[float]]:
    return [array.tolist() for array in cache.state]


def step(backend: faces.AttentionBackend, position: int, tokens: int) -> None:
    block = mx.arange(position, position + tokens, dtype=mx.float32)
    block = mx.broadcast_to(block[None, None, :, None], (1, 1, tokens, 4))
    for layer in range(len(GEOMETRY.layers)):
        backend.attend(layer, block, block, block + layer, 1.0, positions=position)


def test_an_application_can_run_on_the_control_face_alone() -> None:
    sequence = cache()
    control: faces.SequenceControl = sequence
    assert (control.length, control.capacity, control.rewind_floor) == (0, 32, 0)
    control.reserve(10)
    step(sequence, 0, 1)
    reserved = control.nbytes
    step(sequence, 1, 9)
    assert control.nbytes == reserved > 0
    assert control.can_extend(22)
    assert not control.can_extend(23)
    assert control.nbytes_used == reserved
    # Ring of window 4 with 3 spare rows: 6 slots hold positions 4 to 9, and 7 needs 4 to 6.
    assert control.rewind_floor == 7
    before = rows(sequence)
    with pytest.raises(RewindError):
        control.rewind(6)
    with pytest.raises(CapacityError):
        control.reserve(33)
    assert (rows(sequence), control.length) == (before, 10)
    control.rewind(7)
    assert control.length == 7
    assert 0 < control.nbytes_used < control.nbytes
    step(sequence, 7, 1)
    assert control.length == 8
    control.clear()
    assert control.length == 0
    assert control.nbytes == reserved


def test_without_the_reservation_the_same_steps_grow() -> None:
    sequence = cache()
    step(sequence, 0, 1)
    before = sequence.nbytes
    step(sequence, 1, 9)
    assert sequence.nbytes > before


def test_a_byte_layer_can_run_on_the_planner_face_alone() -> None:
    layout = SequenceLayout([layer.policy for layer in GEOMETRY.layers], 32, 3)
    planner: faces.SequencePlanner = layout
    plan = planner.plan(1, 0, 5)
    assert planner.length == 0
    planner.commit(plan)
    planner.commit(planner.plan(0, 0, 5))
    assert planner.length == 5
    planner.admit(5, 27)
    with pytest.raises(KVCacheError):
        planner.admit(5, 28)
    assert planner.length == 5
