"""Rows that take more memory than there is are refused before anything changes, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache import make_prompt_cache
from mlx_kvcache.cache.batched import MLXBatchedSequenceCache
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.engine import Engine
from mlx_kvcache.errors import CapacityError, MemoryLimitError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.layout.footprint import growth_bytes
from mlx_kvcache.store import memory
from tests.support import many_sequences_driver as many
from tests.support.engine_runs import alone, prompts_of, tiny
from tests.support.sequence_oracle import Session, Shape, observe

SHARED = [MLXCellCache, MLXBatchedSequenceCache]
#: Bytes of a row of both of these layers, in float32.
FLAT, RING = Shape(0, 2, 3, 2), Shape(4, 2, 3, 2)
ROW = 2 * (3 + 2) * 4


class Machine:
    """A machine with so many bytes left; `asked` is how often it was looked at."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.asked = 0

    def available_bytes(self) -> int | None:
        self.asked += 1
        return self.left


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Every growth is held against it, however small."""
    machine = Machine()
    monkeypatch.setattr(memory, "available_bytes", machine.available_bytes)
    monkeypatch.setattr(memory, "UNCHECKED_BYTES", 0)
    return machine


def refused(call: Callable[[], object], seen: Callable[[], object]) -> MemoryLimitError:
    before = seen()
    with pytest.raises(MemoryLimitError) as refusal:
        call()
    assert seen() == before
    error = refusal.value
    assert isinstance(error, MemoryError)
    assert error.needed > error.available
    for number in (error.needed, error.available, error.fits):
        assert str(number) in str(error)
    return error


def begun(shapes: list[Shape], **choices: Any) -> Session:
    return Session(shapes, forms=("array",), **choices)


def try_step(run: Session, count: int, layer: int = 0) -> None:
    """The first layer of a step, whose rows the oracle does not hear of."""
    keys, values = map(mx.array, run.rows(layer, count))
    run.caches[0].layer(layer).update_and_fetch(keys, values)


@pytest.mark.parametrize("shapes", [[FLAT, FLAT], [RING, FLAT], [RING, RING]])
@pytest.mark.parametrize("kv_dtype", [None, "float16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_first_write_needs_what_it_allocates(
    machine: Machine, shapes: list[Shape], kv_dtype: str | None, batch: int
) -> None:
    run = begun(shapes, batch=batch, kv_dtype=kv_dtype, initial_capacity=7)
    machine.left = begun_bytes(run, 7) - 1
    cache = run.caches[0]
    error = refused(lambda: try_step(run, 7), lambda: observe(cache))
    assert (error.needed, error.available) == (machine.left + 1, machine.left)
    assert error.fits < 7
    machine.left += 1
    run.step(7)
    run.flush()
    assert cache.nbytes == machine.left
    machine.left = None
    run.step(1)
    run.flush()


def begun_bytes(run: Session, rows: int) -> int:
    size = 2 if run.config.kv_dtype else 4
    total = 0
    for shape in run.shapes:
        ring = shape.window + run.config.spare - 1 if shape.window else rows
        count = ring if shape.window and rows >= shape.window else min(rows, ring)
        total += count * run.batch * shape.kv_heads * (shape.key_dim + shape.value_dim) * size
    return total


@pytest.mark.parametrize("shapes", [[FLAT, RING], [RING, FLAT], [FLAT, FLAT]])
@pytest.mark.parametrize("count", [1, 2])
def test_a_growth_that_cannot_be_had_leaves_the_step_unbegun(
    machine: Machine, shapes: list[Shape], count: int
) -> None:
    run = begun(shapes)
    run.step(3)
    run.step(1)
    cache = run.caches[0]
    assert [layer.rows for layer in cache.layers][shapes.index(FLAT)] == 4, "the next step grows"
    machine.left = 0
    error = refused(lambda: try_step(run, count), lambda: observe(cache))
    assert error.fits == 4
    cache.layout.check_settled()
    machine.left = None
    for _ in range(9):
        run.step(count)
    run.flush()


def test_where_twice_the_rows_do_not_fit_as_many_as_can_are_taken(machine: Machine) -> None:
    run = begun([FLAT, FLAT], capacity=4000, initial_capacity=1024)
    run.step(1024)
    cache = run.caches[0]
    # The old rows stay beside 300 new ones in each layer.
    machine.left = 2 * (300 + 1024) * ROW
    run.step(1)
    run.flush()
    assert [layer.rows for layer in cache.layers] == [1324, 1324]
    run.step(299)
    error = refused(lambda: try_step(run, 300), lambda: observe(cache))
    assert error.needed == 2 * (300 + 1324) * ROW
    machine.left = None
    run.step(300)
    run.flush()
    assert [layer.rows for layer in cache.layers] == [2648, 2648]


def test_the_named_number_of_positions_fits(machine: Machine) -> None:
    config = CacheConfig(100_000, "float32", 50_000)
    geometry = begun([FLAT, RING, FLAT]).caches[0].geometry
    machine.left = 1_000_000
    with pytest.raises(MemoryLimitError) as refusal:
        MLXSequenceCache(geometry, config).reserve(50_000)
    fits = refusal.value.fits
    assert 0.7 * machine.left < 2 * fits * ROW <= machine.left
    cache = MLXSequenceCache(geometry, CacheConfig(fits, "float32", fits))
    cache.reserve(fits)
    rows = mx.ones((1, 2, 1, 3))
    for layer in cache.layers:
        layer.update_and_fetch(rows, rows[..., :2])
    assert 0 < cache.nbytes <= machine.left


def test_a_reservation_is_refused_and_a_capacity_alone_is_not(machine: Machine) -> None:
    machine.left = 100 * ROW
    run = begun([FLAT, RING], capacity=10**6)
    cache = run.caches[0]
    refused(lambda: cache.reserve(10**6), lambda: observe(cache))
    run.step(3)
    refused(lambda: cache.reserve(10**6), lambda: observe(cache))
    run.step(20)
    run.flush()


def test_what_follows_a_clear_is_asked_for_in_its_own_form(machine: Machine) -> None:
    """A larger batch takes more than the rows that are there."""
    run = begun([FLAT, FLAT], initial_capacity=8)
    run.step(3)
    cache = run.caches[0]
    cache.clear()
    rows = mx.ones((4, 2, 3, 3))
    machine.left = 3 * cache.nbytes - 1
    error = refused(
        lambda: cache.layer(0).update_and_fetch(rows, rows[..., :2]), lambda: observe(cache)
    )
    assert error.needed == machine.left + 1
    machine.left = 0
    # The same rows again take none.
    small = rows[:1]
    for layer in (0, 1):
        mx.eval(cache.layer(layer).update_and_fetch(small, small[..., :2]))


def test_a_restored_cache_asks_for_what_it_grows_by(machine: Machine) -> None:
    run = begun([FLAT, RING])
    run.step(3)
    cache = run.caches[0]
    twin = MLXSequenceCache(cache.geometry, cache.config)
    twin.restore(cache.snapshot())
    rows = mx.ones((1, 2, 1, 3))
    machine.left = 0
    for layer in (0, 1):
        mx.eval(twin.layer(layer).update_and_fetch(rows, rows[..., :2]))
    refused(lambda: twin.layer(0).update_and_fetch(rows, rows[..., :2]), lambda: observe(twin))


def test_only_a_growth_looks_at_the_machine(machine: Machine) -> None:
    machine.left = 10**9
    run = begun([FLAT, RING], capacity=100, initial_capacity=4)
    looks = []
    for _ in range(40):
        before = machine.asked
        run.step(1)
        if machine.asked > before:
            looks.append(run.length)
    assert looks == [1, 5, 9, 17, 33]
    run.flush()


def test_small_growths_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.left = 0
    monkeypatch.setattr(memory, "available_bytes", machine.available_bytes)
    monkeypatch.setattr(memory, "_unchecked", memory._Unchecked())
    run = begun([FLAT, RING])
    for count in (3, 1, 30, 1):
        run.step(count)
    run.flush()
    assert machine.asked == 0


def test_many_small_growths_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(memory, "available_bytes", machine.available_bytes)
    monkeypatch.setattr(memory, "UNCHECKED_BYTES", 10 * ROW)
    monkeypatch.setattr(memory, "_unchecked", memory._Unchecked())
    machine.left = 1000 * ROW
    runs = [begun([FLAT, FLAT], initial_capacity=2) for _ in range(6)]
    for run in runs[:5]:
        run.step(1)
    assert 0 < machine.asked < 5
    machine.left = 0
    for run in runs[:3]:
        # The others pass until they add up, and what was refused is asked for again.
        try:
            try_step(run, 8)
        except MemoryLimitError:
            break
    else:
        pytest.fail("none of them was looked at")
    for _ in range(3):
        with pytest.raises(MemoryLimitError):
            try_step(run, 8)


@pytest.mark.parametrize("cache_class", SHARED)
def test_what_is_only_asked_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, cache_class: type[Any]
) -> None:
    machine = Machine()
    monkeypatch.setattr(memory, "available_bytes", machine.available_bytes)
    monkeypatch.setattr(memory, "_unchecked", memory._Unchecked())
    cache = made(cache_class, initial_capacity=2)
    step(cache, [(0, 2)])
    before = memory._unchecked.bytes
    for _ in range(5):
        cache.check_room({0: 300}, (30,))
    assert memory._unchecked.bytes == before > 0
    step(cache, [(0, 9)])
    assert memory._unchecked.bytes > before
    assert machine.asked == 0


def test_the_old_rows_count_while_they_are_copied() -> None:
    assert growth_bytes([(0, 10), (0, 20)]) == 30
    assert growth_bytes([(10, 20)]) == 20
    assert growth_bytes([(10, 20), (30, 30), (1, 3)]) == 23
    assert growth_bytes([(20, 10), (0, 5)]) == 5
    assert growth_bytes([]) == 0


def test_a_real_growth_stays_within_what_it_asked_for() -> None:
    shapes = [Shape(0, 4, 64, 64)] * 12
    cache = begun(shapes, capacity=10_000, initial_capacity=512).caches[0]
    rows = mx.ones((1, 4, 512, 64))
    for layer in cache.layers:
        layer.update_and_fetch(rows, rows)
    mx.eval(cache.state)
    mx.synchronize()
    held, before = cache.form, mx.get_active_memory()
    assert held is not None
    asked = cache.growth.bytes_for(1024, held, held)
    mx.reset_peak_memory()
    rows = mx.ones((1, 4, 1, 64))
    total = mx.array(0.0)
    for layer in cache.layers:
        keys, values = layer.update_and_fetch(rows + total * 0, rows)
        total = total + keys.sum() + values.sum()
    mx.eval(total, cache.state)
    assert cache.layers[0].rows == 1024
    taken = mx.get_peak_memory() - before
    assert asked / 2 < taken < asked + 2**20


def made(cache_class: type[Any], **choices: Any) -> Any:
    cache = cache_class(many.geometry_of((0, 3)), CacheConfig(**{"capacity": 400, **choices}))
    cache.new()
    return cache


def seen(cache: Any) -> list[Any]:
    """All that can be seen but the cells of the last placement: there is none."""
    before = list(many.observe(cache))
    if isinstance(cache, MLXCellCache):
        assert cache.layout.now.placed is None
        del before[-1]
    return before


def step(cache: Any, spans: list[tuple[int, int]]) -> list[Any]:
    cache.declare_step(spans)
    tokens = sum(count for _, count in spans)
    return [attend(cache, layer, tokens) for layer in (0, 1)]


def attend(cache: Any, layer: int, tokens: int) -> Any:
    queries = mx.arange(1, tokens * 16 + 1).reshape(1, tokens, 4, 4).swapaxes(1, 2) / 100
    keys = queries[:, :2] + layer
    return cache.attend(layer, queries, keys, keys[..., :3], 0.3).tolist()


@pytest.mark.parametrize("cache_class", SHARED)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_over_many_sequences_stays_declared(
    machine: Machine, cache_class: type[Any], layer: int
) -> None:
    cache, twin = (made(cache_class, initial_capacity=2, spare=2) for _ in range(2))
    for each in (cache, twin):
        each.new()
    machine.left = 0
    spans = [(1, 1), (0, 2)]
    cache.declare_step(spans)
    refused(lambda: attend(cache, layer, 3), lambda: seen(cache))
    assert not cache.unfinished
    machine.left = None
    assert [attend(cache, each, 3) for each in (0, 1)] == step(twin, spans)
    machine.left = 0
    spans = [(0, 3), (1, 4)]
    cache.declare_step(spans)
    refused(lambda: attend(cache, layer, 7), lambda: seen(cache))
    assert not cache.unfinished
    machine.left = None
    assert [attend(cache, each, 7) for each in (0, 1)] == step(twin, spans)
    for spans in ([(1, 1), (0, 1)], [(0, 9)]):
        assert step(cache, spans) == step(twin, spans)
    # Not compared whole: what was derived anew has no holes of former steps.
    assert many.observe(cache)[:8] == many.observe(twin)[:8]


def test_sequences_that_grow_together_are_counted_together(machine: Machine) -> None:
    cache = made(MLXBatchedSequenceCache, initial_capacity=4, spare=2)
    cache.new()
    step(cache, [(0, 4), (1, 4)])
    one = cache.sequence(0)
    alone = one.growth.bytes_for(5, one.form, one.form)
    machine.left = 2 * alone - 1
    cache.declare_step([(0, 1), (1, 1)])
    error = refused(lambda: attend(cache, 0, 2), lambda: many.observe(cache))
    assert error.needed == 2 * alone
    assert "each of 2 sequences" in str(error)
    machine.left = 2 * alone
    for layer in (0, 1):
        attend(cache, layer, 2)
    # Not doubled, for which there is no memory.
    assert [cache.sequence(i).layers[0].rows for i in (0, 1)] == [5, 5]


def test_a_mask_before_the_first_rows_does_not_pass_them(machine: Machine) -> None:
    """It is not known yet that they have 32 bits."""
    rows = mx.ones((1, 2, 8, 4))
    for cache_class in SHARED:
        cache = made(cache_class, initial_capacity=8, spare=2)
        machine.left = 8 * 2 * 7 * 2 * 2
        cache.declare_step([(0, 8)])
        cache.make_mask(0)
        refused(
            lambda cache=cache: cache.update_and_fetch(0, rows, rows[..., :3]),
            lambda cache=cache: many.observe(cache),
        )
        machine.left = None
        for layer in (0, 1):
            cache.update_and_fetch(layer, rows, rows[..., :3])
        assert (cache.position(0), cache.unfinished) == (8, {})
        cache = made(cache_class, initial_capacity=8, spare=2)
        machine.left = 8 * 2 * 7 * 2 * 2
        half = rows.astype(mx.float16)
        cache.declare_step([(0, 8)])
        for layer in (0, 1):
            cache.update_and_fetch(layer, half, half[..., :3])


def test_cells_are_reserved_or_refused(machine: Machine) -> None:
    cache = made(MLXCellCache, initial_capacity=2)
    machine.left = 399 * 2 * 7 * 2 * 2
    error = refused(lambda: cache.reserve(400), lambda: many.observe(cache))
    assert error.fits == 399 * 3 // 4
    machine.left = 100 * 2 * 7 * 2 * 4
    step(cache, [(0, 2)])
    refused(lambda: cache.reserve(400), lambda: many.observe(cache))
    cache.reserve(40)
    step(cache, [(0, 30)])


@pytest.mark.parametrize("cache_class", SHARED)
def test_room_is_asked_for_without_taking_it(machine: Machine, cache_class: type[Any]) -> None:
    cache = made(cache_class, initial_capacity=2)
    step(cache, [(0, 2)])
    before = many.observe(cache)
    machine.left = 0
    cache.check_room({0: 2})
    with pytest.raises(MemoryLimitError):
        cache.check_room({0: 30})
    with pytest.raises(MemoryLimitError):
        cache.check_room({}, (30,))
    machine.left = 10**6
    cache.check_room({0: 30}, (30, 40))
    assert many.observe(cache) == before


@pytest.mark.parametrize("kind", ["cell", "batched"])
def test_an_engine_starts_what_there_is_memory_for(machine: Machine, kind: str) -> None:
    model = tiny("llama")
    first, second = prompts_of("llama", (5, 7))
    expected, last = alone(model, first, 6), alone(model, second, 4)
    with Engine(model, 4000, kind, initial_capacity=16) as engine:
        short = engine.submit(first, max_tokens=6)
        engine.step()
        machine.left = 0
        long = engine.submit(second, max_tokens=3000)
        engine.step()
        assert engine.waiting == (long,), "it waits for what runs"
        while short.finish_reason is None:
            engine.step()
        assert short.tokens == expected
        with pytest.raises(MemoryLimitError, match=r"positions|cells"):
            engine.step()
        with pytest.raises(MemoryLimitError):
            list(long.stream())
        assert engine.waiting == (long,)
        long.cancel()
        machine.left = None
        again = engine.submit(second, max_tokens=4)
        assert list(again.stream()) == last
        with pytest.raises(CapacityError):
            engine.submit(second, max_tokens=4000)


@pytest.mark.parametrize("kind", ["cell", "batched"])
def test_a_conversation_waits_for_memory_and_keeps_its_tokens(machine: Machine, kind: str) -> None:
    model = tiny("llama")
    (prompt,) = prompts_of("llama", (5,))
    with Engine(model, 4000, kind, initial_capacity=16) as engine:
        session = engine.open()
        answer = list(session.submit(prompt, max_tokens=4).stream())
        held = list(session.tokens)
        machine.left = 0
        request = session.submit(prompt, max_tokens=3000)
        with pytest.raises(MemoryLimitError):
            engine.step()
        assert session.tokens == held
        request.cancel()
        engine.step()
        machine.left = None
        more = list(session.submit(prompt, max_tokens=4).stream())
        assert more == alone(model, [*prompt, *answer, *prompt], 4)


@pytest.mark.parametrize("kind", ["cell", "batched"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_request_that_waited_starts_once_memory_is_back(
    machine: Machine, kind: str, others: int
) -> None:
    """Memory that others of the process, or of the machine, gave back."""
    with Engine(tiny("llama"), 4000, kind, initial_capacity=16) as engine:
        running = [engine.submit([1, 2], max_tokens=60) for _ in range(others)]
        engine.step()
        machine.left = 0
        request = engine.submit([3, 4], max_tokens=200)
        for _ in range(2):
            if others:
                engine.step()
            else:
                with pytest.raises(MemoryLimitError):
                    engine.step()
        machine.left = None
        engine.step()
        assert engine.active == (*running, request)
        assert all(each.finish_reason is None for each in running)


def test_a_prompt_cache_is_refused_before_the_model_runs(machine: Machine) -> None:
    model = tiny("llama")
    tokens = mx.array(prompts_of("llama", (5,)))
    machine.left = 1000
    cache = make_prompt_cache(model, 100_000, initial_capacity=100_000)
    refused(lambda: model(tokens, cache=cache), lambda: observe(cache.sequence))
    machine.left = None
    small = make_prompt_cache(model, 100_000)
    assert model(tokens, cache=small).tolist() == model(tokens).tolist()
