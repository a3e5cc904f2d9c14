"""`update_and_attend` against the brute-force oracle, on any layers and any steps."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.cache import sequence
from mlx_kvcache.control.op import update_and_attend
from mlx_kvcache.errors import RewindError
from mlx_kvcache.store.rows import RowView
from tests.support.brute_force_attention import History, numbers
from tests.support.op_driver import (
    CLOSE,
    POSITION_FORMS,
    Duel,
    Layer,
    draw,
    make_cache,
    observe,
    positions_as,
    step_rows,
)

LAYERS = st.builds(
    Layer,
    window=st.sampled_from([0, *range(10)]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 4),
    value_dim=st.integers(1, 5),
    readers=st.sampled_from([1, 1, 2, 3]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
)
#: A step of so many tokens, or a rewind by so many (negative).
MOVES = st.lists(st.one_of(st.integers(1, 8), st.just(1), st.integers(-6, -1)), max_size=14)


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=3),
    moves=MOVES,
    batch=st.integers(1, 2),
    spare=st.integers(1, 5),
    kv_dtype=st.sampled_from([None, "float32", "float16", "bfloat16"]),
    initial_capacity=st.integers(0, 6),
    form=st.sampled_from(["array", "integer"]),
    positions=st.lists(st.sampled_from(POSITION_FORMS), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_every_step_answers_what_the_oracle_answers(
    layers: list[Layer],
    moves: list[int],
    batch: int,
    spare: int,
    kv_dtype: str | None,
    initial_capacity: int,
    form: str,
    positions: list[str],
    seed: int,
) -> None:
    duel = Duel(
        layers,
        batch,
        seed,
        spare=spare,
        kv_dtype=kv_dtype,
        initial_capacity=initial_capacity,
        form=form,
    )
    for number, move in enumerate([3, *moves]):
        if move > 0:
            duel.step(move, positions[number % len(positions)])
            continue
        target = max(0, duel.length + move)
        before = observe(duel.cache)
        try:
            duel.rewind(target)
        except RewindError:
            assert 0 < target < duel.cache.rewind_floor
            assert observe(duel.cache) == before


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("query_dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, mx.float32, mx.float16])
def test_the_output_has_the_querys_dtype_whatever_is_stored(
    kv_dtype: str, query_dtype: mx.Dtype, out_dtype: mx.Dtype | None
) -> None:
    layer = Layer(window=4, kv_heads=2, group=2, key_dim=8, value_dim=6)
    cache = make_cache([layer], kv_dtype=kv_dtype)
    history = History(layer.window, {"float16": mx.float16, "bfloat16": mx.bfloat16}[kv_dtype])
    random = np.random.default_rng(7)
    start = 0
    for tokens in (5, 1, 2, 1):
        rows = [array.astype(query_dtype) for array in step_rows(layer, random, 1, tokens)]
        answer = update_and_attend(*rows, start, 0, 0.5, cache=cache, out_dtype=out_dtype)
        history.write(start, rows[1], rows[2])
        expected = history.attend(start, rows[0], 0.5)
        start += tokens
        assert answer.dtype == (out_dtype or query_dtype)
        assert (
            cache.layers[0].keys.dtype == {"float16": mx.float16, "bfloat16": mx.bfloat16}[kv_dtype]
        )
        limit = CLOSE if query_dtype == mx.float32 and answer.dtype == mx.float32 else 0.03
        assert np.abs(numbers(answer) - expected).max() < limit


def test_the_value_dim_is_the_outputs() -> None:
    layer = Layer(key_dim=24, value_dim=16, group=4)
    duel = Duel([layer], 1, 3)
    for tokens in (4, 1, 1):
        duel.step(tokens)
    rows = step_rows(layer, duel.random, 1, 1)
    answer = update_and_attend(*rows, duel.length, 0, 0.2, cache=duel.cache)
    assert answer.shape == (1, 4, 1, 16)


def replay(
    layer: Layer,
    steps: list[tuple[mx.array, mx.array, mx.array]],
    changed: tuple[int, int] | None = None,
    **choices: object,
) -> np.ndarray:
    """The answers of all steps; `changed` names a position whose key (0) or value (1) differs."""
    cache = make_cache([layer], **choices)
    start, answers = 0, []
    for queries, keys, values in steps:
        tokens = keys.shape[2]
        if changed is not None and start <= changed[0] < start + tokens:
            bump = mx.zeros(keys.shape if changed[1] == 0 else values.shape)
            bump[:, :, changed[0] - start] = 0.5
            keys, values = (keys + bump, values) if changed[1] == 0 else (keys, values + bump)
        answers.append(update_and_attend(queries, keys, values, start, 0, 0.7, cache=cache))
        start += tokens
    return np.array(mx.concatenate(answers, axis=2))


@given(
    window=st.integers(0, 6),
    spare=st.integers(1, 4),
    chunks=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    kv_dtype=st.sampled_from([None, "float16", "bfloat16"]),
    part=st.integers(0, 1),
    data=st.data(),
)
def test_a_visible_row_changes_the_answer_and_an_invisible_one_does_not(
    window: int,
    spare: int,
    chunks: list[int],
    kv_dtype: str | None,
    part: int,
    data: st.DataObject,
) -> None:
    layer = Layer(window=window, kv_heads=1, group=2, key_dim=4, value_dim=4, sinks=False)
    random = np.random.default_rng(sum(chunks))
    steps = [step_rows(layer, random, 1, tokens) for tokens in chunks]
    place = data.draw(st.integers(0, sum(chunks) - 1))
    choices = {"spare": spare, "kv_dtype": kv_dtype}
    plain = replay(layer, steps, **choices)
    other = replay(layer, steps, (place, part), **choices)
    for query in range(sum(chunks)):
        seen = place <= query and (not window or place > query - window)
        # One visible row takes all the weight, whatever its key is.
        matters = seen and (part == 1 or (query > 0 and window != 1))
        differs = plain[:, :, query].tobytes() != other[:, :, query].tobytes()
        assert differs == matters, f"query {query}, row {place}"


@pytest.mark.parametrize("window", [0, 4, 5])
def test_what_was_rewound_leaves_no_trace(window: int) -> None:
    layer = Layer(window=window, group=2)

    def run(seed: int) -> list[bytes]:
        cache = make_cache([layer], spare=4)
        kept, dropped = np.random.default_rng(1), np.random.default_rng(seed)
        answers = []
        for start, tokens, random in ((0, 9, kept), (9, 3, dropped), (9, 2, kept), (11, 1, kept)):
            if random is kept and cache.length > start:
                cache.rewind(start)
            rows = step_rows(layer, random, 1, tokens)
            answer = update_and_attend(*rows, start, 0, 1.0, cache=cache)
            answers.append(np.array(answer).tobytes())
        return answers

    first, second = run(2), run(3)
    assert first[1] != second[1], "the dropped step made no difference while it was there"
    assert first[0] == second[0]
    assert first[2:] == second[2:]


def test_positions_may_be_advanced_in_place_between_steps() -> None:
    layer = Layer(window=3)
    cache, whole = make_cache([layer]), make_cache([layer])
    random = np.random.default_rng(5)
    positions = mx.array([0])
    for start in range(6):
        rows = step_rows(layer, random, 1, 1)
        answer = update_and_attend(*rows, positions, 0, 1.0, cache=cache)
        expected = update_and_attend(*rows, start, 0, 1.0, cache=whole)
        assert answer.tolist() == expected.tolist()
        assert cache.length == start + 1
        before, same = id(positions), positions
        positions += 1
        assert id(positions) == before
        assert same.item() == start + 1, "the object stays and its number moves"


@pytest.mark.parametrize("form", POSITION_FORMS)
def test_every_form_of_positions_means_the_same(form: str) -> None:
    layer = Layer(window=4, group=2)
    answers = []
    for used in (form, "int"):
        cache, random, start = make_cache([layer]), np.random.default_rng(4), 0
        for tokens in (5, 1, 3):
            rows = step_rows(layer, random, 1, tokens)
            places = positions_as(used, start, tokens)
            answers.append(update_and_attend(*rows, places, 0, 1.0, cache=cache).tolist())
            start += tokens
    assert answers[:3] == answers[3:]
    assert answers[0] != answers[1]


def test_a_shared_layer_reads_the_donors_rows_and_not_its_own() -> None:
    layer = Layer(window=4, readers=2)
    random = np.random.default_rng(8)
    cache = make_cache([layer], spare=2)
    # 6 tokens are more than the ring keeps: the answer is held for the readers of this step.
    rows = step_rows(layer, random, 1, 6)
    donor = update_and_attend(*rows, 0, 0, 1.0, cache=cache)
    noise = step_rows(layer, random, 1, 6)
    again = update_and_attend(rows[0], *noise[1:], 0, 0, 1.0, cache=cache)
    assert again.tolist() == donor.tolist()
    other = update_and_attend(noise[0], *noise[1:], 0, 0, 1.0, cache=cache)
    assert other.tolist() != donor.tolist()
    assert cache.length == 6


def test_sinks_take_weight() -> None:
    layer = Layer(group=2)
    random = np.random.default_rng(6)
    rows = step_rows(layer, random, 1, 3)
    sinks = draw(random, 2) + 3
    plain = update_and_attend(*rows, 0, 0, 1.0, cache=make_cache([layer]))
    sunk = update_and_attend(*rows, 0, 0, 1.0, cache=make_cache([layer]), sinks=sinks)
    none = update_and_attend(
        *rows, 0, 0, 1.0, cache=make_cache([layer]), sinks=mx.full((2,), -80.0)
    )
    assert np.abs(np.array(sunk)).sum() < np.abs(np.array(plain)).sum()
    assert np.allclose(np.array(none), np.array(plain), atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("is_masked", [False, True])
def test_layers_of_a_step_may_be_written_by_others_too(tokens: int, is_masked: bool) -> None:
    layer = Layer(window=4, readers=2)
    cache, alone = make_cache([layer] * 2), make_cache([layer] * 2)
    random = np.random.default_rng(9)
    start = 0
    for count in (5, tokens):
        rows = step_rows(layer, random, 1, count)
        if is_masked:
            cache.layer(0).make_mask(count)
        # Layer 0 is written without the op, and perhaps answered in another order of its rows.
        cache.layer(0).update_and_fetch(*rows[1:])
        mixed = [update_and_attend(*rows, start, index, 1.0, cache=cache) for index in (1, 0)]
        plain = [update_and_attend(*rows, start, index, 1.0, cache=alone) for index in (0, 1)]
        for got, expected in zip(mixed, plain, strict=True):
            assert np.allclose(np.array(got), np.array(expected), atol=1e-6)
        start += count


def test_a_wrapped_ring_is_read_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the mask before the write spares a copy of the ring in every decode step."""
    layer = Layer(window=4)
    cache = make_cache([layer], spare=3)
    random = np.random.default_rng(9)
    update_and_attend(*step_rows(layer, random, 1, 6), 0, 0, 1.0, cache=cache)
    rows_read = []
    right = sequence.attend_view

    def watched(queries: mx.array, view: RowView, *rest: Any) -> mx.array:
        rows_read.append(view.dense()[0].shape[2])
        return right(queries, view, *rest)

    monkeypatch.setattr(sequence, "attend_view", watched)
    for start in range(6, 12):
        update_and_attend(*step_rows(layer, random, 1, 1), start, 0, 1.0, cache=cache)
    assert rows_read == [cache.layers[0].rows] * 6
