"""Snapshots: what was held is put back bit for bit, whatever has happened since."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache import (
    CacheConfig,
    CacheGeometry,
    MLXBatchedSequenceCache,
    MLXCellCache,
    MLXSequenceCache,
    make_prompt_cache,
)
from mlx_kvcache.errors import PositionError, SnapshotError, StepError
from tests.support.arrays import raw
from tests.support.sequence_oracle import simple_geometry
from tests.support.tiny_models import all_families, build

WINDOWS = (0, 3, 5)
CONFIG = CacheConfig(200, initial_capacity=2, spare=2)
KINDS = {"sequence": MLXSequenceCache, "cell": MLXCellCache, "batched": MLXBatchedSequenceCache}


def geometry(*windows: int) -> CacheGeometry:
    return simple_geometry(*(windows or WINDOWS))


class Run:
    """A cache of any kind, fed with rows that only depend on the sequence, position and layer."""

    def __init__(self, kind: str, config: CacheConfig = CONFIG) -> None:
        self.kind = kind
        self.cache: Any = KINDS[kind](geometry(), config)
        self.sequences = [0] if kind == "sequence" else [self.cache.new(), self.cache.new()]

    def position(self, sequence: int) -> int:
        return self.cache.length if self.kind == "sequence" else self.cache.position(sequence)

    def step(self, count: int, seed: int = 0) -> list[Any]:
        """A step of every sequence, and what it was answered."""
        counts = [(sequence, count) for sequence in self.sequences]
        if self.kind != "sequence":
            self.cache.declare_step(counts)
        answers = []
        for layer in range(len(WINDOWS)):
            blocks = [self._rows(s, count, layer, seed) for s, count in counts]
            queries, keys, values = (mx.concatenate(parts, axis=2) for parts in zip(*blocks))  # noqa: B905
            answers.append(self.cache.attend(layer, queries, keys, values, 0.7))
        mx.eval(answers)
        return [raw(answer) for answer in answers]

    def _rows(self, sequence: int, count: int, layer: int, seed: int) -> list[mx.array]:
        key = [seed, sequence, self.position(sequence) if not layer else self._start, layer]
        self._start = key[2]
        random = np.random.default_rng(key)
        facts = self.cache.geometry.layers[layer]
        heads, key_dim, value_dim = facts.kv_heads, facts.key_dim, facts.value_dim
        shapes = [(1, 2 * heads, count, key_dim), (1, heads, count, key_dim)]
        shapes.append((1, heads, count, value_dim))
        return [mx.array(random.normal(size=shape).astype(np.float32)) for shape in shapes]

    def observe(self) -> Any:
        return [raw(array) for array in self.cache.state], [
            self.position(sequence) for sequence in self.sequences
        ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(
    before=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    after=st.lists(st.integers(1, 6), max_size=4),
)
def test_what_was_held_is_put_back(kind: str, before: list[int], after: list[int]) -> None:
    run = Run(kind)
    for count in before:
        run.step(count)
    held = run.observe()
    snapshot = run.cache.snapshot()
    assert snapshot.nbytes == sum(array.nbytes for array in run.cache.state) > 0
    expected = run.step(2)
    for count in after:
        run.step(count, seed=1)
    run.cache.restore(snapshot)
    assert run.observe() == held
    assert run.step(2) == expected
    # A snapshot serves more than once, also another cache of the same geometry and config, which
    # need not have been made for a model whose weights are known.
    other = Run(kind, replace(CONFIG, weight_bytes=1))
    other.step(3, seed=2)
    other.cache.restore(snapshot)
    assert other.observe() == held
    assert other.step(2, seed=1) != expected
    other.cache.restore(snapshot)
    assert other.step(2) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_ring_comes_back_below_its_rewind_floor(kind: str) -> None:
    run = Run(kind)
    for _ in range(9):
        run.step(1)
    snapshot = run.cache.snapshot()
    if kind == "sequence":
        assert run.cache.rewind_floor > 0, "the ring has wrapped"
    expected = [run.step(1) for _ in range(6)]
    if kind == "sequence":
        assert run.cache.rewind_floor > 9, "a rewind could not go back"
    run.cache.restore(snapshot)
    assert [run.step(1) for _ in range(6)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_of_another_cache_is_refused(kind: str) -> None:
    run = Run(kind)
    run.step(3)
    before = run.observe()
    strangers = [Run(other).cache.snapshot() for other in KINDS if other != kind]
    strangers.append(KINDS[kind](geometry(0, 3, 4), CONFIG).snapshot())
    strangers.append(KINDS[kind](geometry(), CacheConfig(201)).snapshot())
    for stranger in (*strangers, None, []):
        with pytest.raises(SnapshotError):
            run.cache.restore(stranger)
        assert run.observe() == before


@pytest.mark.parametrize("kind", KINDS)
def test_no_snapshot_is_taken_in_the_middle_of_a_step(kind: str) -> None:
    run = Run(kind)
    run.step(3)
    if kind != "sequence":
        run.cache.declare_step([(0, 1)])
    rows = run._rows(0, 1, 0, 0)
    run.cache.attend(0, *rows, 0.7)
    with pytest.raises((PositionError, StepError), match=r"not finished|half-way"):
        run.cache.snapshot()
    run.cache.rewind(*([3] if kind == "sequence" else [0, 3]))
    run.cache.snapshot()


@pytest.mark.usefixtures("collected")
def test_a_snapshot_costs_nothing_until_the_next_write() -> None:
    cache = MLXSequenceCache(simple_geometry(0, kv_heads=8, key_dim=128, value_dim=128))
    rows = mx.ones((1, 8, 2048, 128))
    cache.layer(0).update_and_fetch(rows, rows)
    mx.eval(cache.state)
    before = mx.get_active_memory()
    snapshot = cache.snapshot()
    assert mx.get_active_memory() == before
    mx.eval(cache.layer(0).update_and_fetch(rows[:, :, :1], rows[:, :, :1]))
    mx.eval(cache.state)
    assert mx.get_active_memory() - before >= snapshot.nbytes
    del snapshot
    before = mx.get_active_memory()
    mx.eval(cache.layer(0).update_and_fetch(rows[:, :, :1], rows[:, :, :1]), cache.state)
    assert mx.get_active_memory() - before < cache.nbytes // 8


def test_a_fork_up_to_a_position_goes_its_own_way() -> None:
    run = Run("sequence")
    for _ in range(7):
        run.step(1)
    twin = Run("sequence")
    twin.cache = run.cache.fork(6)
    held = run.observe()
    assert twin.cache.length == 6
    twin.step(4, seed=3)
    assert run.observe() == held
    assert twin.observe() != held


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "falcon_h1"])
def test_a_prompt_cache_takes_its_recurrent_states_along(family: str) -> None:
    model = build(family, all_families()[family])
    tokens = mx.random.randint(1, 60, (1, 30))
    cache = make_prompt_cache(model, spare=2)
    assert bool(cache.recurrent) == (family != "gemma3_text")
    mx.eval(model(tokens[:, :20], cache=cache))
    snapshot = cache.snapshot()
    twin = cache.fork()
    expected = raw(model(tokens[:, 20:], cache=cache))
    model(tokens[:, 2:15], cache=cache)
    cache.restore(snapshot)
    assert raw(model(tokens[:, 20:], cache=cache)) == expected
    assert raw(model(tokens[:, 20:], cache=twin)) == expected
    cache.restore(snapshot)
    assert raw(model(tokens[:, 19:29], cache=cache)) != expected


@pytest.mark.slow
def test_copies_run_each_in_a_thread_of_its_own() -> None:
    """No array that one thread has yet to evaluate is met by another."""
    model = build("gemma3_text", all_families()["gemma3_text"])
    cache = make_prompt_cache(model, spare=4)
    for _ in range(3):
        mx.eval(model(mx.arange(1, 9)[None], cache=cache))
    assert cache.sequence.rewind_floor > 0, "the rings have wrapped"
    copies = [copy.deepcopy(cache), cache.fork(), copy.deepcopy(cache), cache.fork()]
    answers: dict[int, list[int]] = {}
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            token, answers[number] = 5, []
            for _ in range(60):
                logits = model(mx.array([[token]]), cache=copies[number])
                token = int(mx.argmax(logits[0, -1]).item())
                answers[number].append(token)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(copies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_a_cache_goes_to_another_thread_once_its_answer_is_computed(tokens: int) -> None:
    """Also after a step larger than the spare rows, which answers before it writes."""
    cache = MLXSequenceCache(simple_geometry(4), CacheConfig(99, spare=2))
    facts = cache.geometry.layers[0]
    keys = mx.ones((1, facts.kv_heads, tokens, facts.key_dim))
    values = mx.ones((1, facts.kv_heads, tokens, facts.value_dim))
    failures: list[BaseException] = []

    def step() -> None:
        try:
            mx.eval(cache.attend(0, keys, keys, values, 1.0))
        except RuntimeError as error:
            failures.append(error)

    for _ in range(4):
        step()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert not failures
    assert cache.length == 8 * tokens
