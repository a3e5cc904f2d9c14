"""`AttendSpec` and `attend`: what each kind lets a query see, checked against the definition."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.cache.attention import AttendSpec, attend
from mlx_kvcache.errors import AttentionError, UpdateDtypeError, UpdateShapeError
from tests.support import attention_oracle
from tests.support.brute_force_attention import History, numbers
from tests.support.op_driver import CLOSE, Layer, draw, make_cache, step_rows


def rows(tokens: int, held: int, heads: int = 2, group: int = 2, dim: int = 4) -> list[mx.array]:
    random = np.random.default_rng(tokens + 10 * held)
    return [
        draw(random, 2, heads * group, tokens, dim),
        draw(random, 2, heads, held, dim),
        draw(random, 2, heads, held, dim + 1),
    ]


def by_hand(
    arrays: list[mx.array], seen: np.ndarray, scale: float, sinks: Any = None, softcap: Any = None
) -> np.ndarray:
    """Softmax over the seen rows only: nothing is masked, what is not seen is left out."""
    queries, keys, values = map(numbers, arrays)
    batch, heads, tokens, _ = queries.shape
    group = heads // keys.shape[1]
    out = np.zeros((batch, heads, tokens, values.shape[3]))
    for place in np.ndindex(batch, heads, tokens):
        sequence, head, _ = place
        chosen = np.flatnonzero(np.broadcast_to(seen, (batch, heads, *seen.shape[-2:]))[place])
        scores = keys[sequence, head // group, chosen] @ queries[place] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        total = weights.sum() + (np.exp(sinks[head]) if sinks is not None else 0)
        if len(chosen):
            out[place] = weights @ values[sequence, head // group, chosen] / total
    return out


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@given(tokens=st.integers(1, 5), held=st.integers(0, 6))
def test_kinds(softcap: float | None, has_sinks: bool, tokens: int, held: int) -> None:
    total = tokens + held
    arrays = rows(tokens, total)
    sinks = draw(np.random.default_rng(total), 4) if has_sinks else None
    options = {"sinks": sinks, "softcap": softcap}
    known = None if sinks is None else numbers(sinks)
    random = np.random.default_rng(held)
    mask = random.random((2, 4, tokens, total)) < 0.5
    mask[:, :, 0] = False
    seen = {
        "none": np.ones((tokens, total), bool),
        "causal": np.arange(total) <= np.arange(tokens)[:, None] + held,
        "explicit": mask,
    }
    for kind, visible in seen.items():
        spec = AttendSpec(kind, mx.array(visible) if kind == "explicit" else None)
        got = np.array(attend(*arrays, spec, 0.7, **options))
        expected = by_hand(arrays, visible, 0.7, known, softcap)
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() < CLOSE, kind
    # The first query of the explicit mask sees nothing at all.
    assert not np.any(got[:, :, 0])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (4, 3, 5), (2, 1, 3, 5), (1, 4, 3, 5)])
def test_masks_broadcast_and_true_means_attend(
    shape: tuple[int, ...], softcap: float | None
) -> None:
    arrays = rows(3, 5)
    mask = np.random.default_rng(1).random(shape) < 0.6
    mask[..., 0] = True
    got = np.array(attend(*arrays, AttendSpec("explicit", mx.array(mask)), 0.7, softcap=softcap))
    assert np.abs(got - by_hand(arrays, mask, 0.7, softcap=softcap)).max() < CLOSE
    inverted = np.array(
        attend(*arrays, AttendSpec("explicit", mx.array(~mask)), 0.7, softcap=softcap)
    )
    assert np.abs(got - inverted).max() > 0.1


def test_causal_is_aligned_to_the_last_row() -> None:
    queries, keys, values = rows(2, 6)
    whole = attend(queries, keys, values, AttendSpec("causal"), 1.0)
    shorter = attend(queries[:, :, :1], keys[:, :, :5], values[:, :, :5], AttendSpec("none"), 1.0)
    upper_left = attend(
        queries[:, :, :1], keys[:, :, :1], values[:, :, :1], AttendSpec("none"), 1.0
    )
    assert np.allclose(np.array(whole[:, :, :1]), np.array(shorter), atol=1e-6)
    assert not np.allclose(np.array(whole[:, :, :1]), np.array(upper_left), atol=1e-3)


def test_stored_rows_are_computed_in_the_querys_dtype() -> None:
    queries, keys, values = rows(2, 4)
    half = [keys.astype(mx.bfloat16), values.astype(mx.bfloat16)]
    got = attend(queries, *half, AttendSpec("causal"), 1.0)
    assert got.dtype == mx.float32
    visible = np.arange(4) <= np.arange(2)[:, None] + 2
    assert np.abs(np.array(got) - by_hand([queries, *half], visible, 1.0)).max() < CLOSE
    assert np.abs(np.array(got) - by_hand([queries, keys, values], visible, 1.0)).max() > 1e-4
    assert attend(queries, *half, AttendSpec("none"), 1.0, out_dtype=mx.float16).dtype == mx.float16


@pytest.mark.parametrize(
    ("kind", "mask", "error", "message"),
    [
        ("explicit", None, AttentionError, "needs a mask"),
        ("none", mx.ones((2, 2), mx.bool_), AttentionError, "would ignore it"),
        ("causal", mx.ones((2, 2), mx.bool_), AttentionError, "would ignore it"),
        ("band", None, AttentionError, "'band'"),
        ("explicit", mx.zeros((2, 2)), UpdateDtypeError, "float32"),
        ("explicit", np.ones((2, 2), bool), UpdateDtypeError, "bool mx.array"),
        ("explicit", mx.ones((2,), mx.bool_), AttentionError, "2 to 4 axes"),
        ("explicit", mx.ones((1, 1, 1, 2, 2), mx.bool_), AttentionError, "2 to 4 axes"),
    ],
)
def test_specs_that_cannot_be(kind: Any, mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttendSpec(kind, mask)


def test_specs_of_masks() -> None:
    mask = mx.ones((2, 2), mx.bool_)
    assert AttendSpec.from_mask(None).kind == "none"
    assert AttendSpec.from_mask("causal").kind == "causal"
    assert AttendSpec.from_mask(mask).mask is mask
    with pytest.raises(AttentionError, match="''"):
        AttendSpec.from_mask("")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttendSpec("causal"), "see nothing"),
        (AttendSpec("explicit", mx.ones((3, 4), mx.bool_)), "broadcast"),
        (AttendSpec("explicit", mx.ones((1, 2), mx.bool_)), "broadcast"),
        (AttendSpec("explicit", mx.ones((2, 3, 2), mx.bool_)), "broadcast"),
        (AttendSpec("explicit", mx.ones((3, 1, 3, 2), mx.bool_)), "broadcast"),
    ],
)
def test_specs_that_do_not_fit_the_rows(spec: AttendSpec, message: str) -> None:
    with pytest.raises(AttentionError, match=message):
        attend(*rows(3, 2), spec, 1.0)


def test_rows_that_do_not_fit() -> None:
    queries, keys, values = rows(2, 2)
    with pytest.raises(AttentionError, match="0 rows"):
        attend(queries, keys[:, :, :0], values[:, :, :0], AttendSpec("none"), 1.0)
    with pytest.raises(UpdateShapeError, match="multiple"):
        attend(queries[:, :3], keys, values, AttendSpec("none"), 1.0)


#: The kinds that a cache hands out, by window, tokens of the step, and what was held before.
HANDED_OUT = {
    (0, 1, 0): "none",
    (0, 4, 0): "causal",
    (0, 3, 5): "causal",
    (0, 1, 9): "none",
    (4, 4, 0): "causal",
    (4, 5, 0): "explicit",
    (4, 1, 3): "none",
    (9, 2, 3): "causal",
    (4, 2, 3): "explicit",
}


@pytest.mark.parametrize(("window", "tokens", "held"), HANDED_OUT)
def test_what_a_cache_hands_out(window: int, tokens: int, held: int) -> None:
    layer = Layer(window=window)
    cache = make_cache([layer], spare=8)
    random = np.random.default_rng(1)
    if held:
        cache.layer(0).update_and_fetch(*step_rows(layer, random, 1, held)[1:])
    spec = AttendSpec.from_mask(cache.layers[0].mask_at(held, tokens))
    assert spec.kind == HANDED_OUT[window, tokens, held]


def array_oracle(window: int, chunks: list[int], **options: Any) -> tuple[Any, Any]:
    """The answers of the oracle that computes with whole arrays, and of the brute-force one."""
    layer = Layer(window=window, kv_heads=2, group=2, key_dim=4, value_dim=3)
    geometry = make_cache([layer]).geometry
    quick = attention_oracle.AttentionOracle(geometry, options.pop("kv_dtype", None))
    history = History(window, options.pop("dtype", None))
    random = np.random.default_rng(2)
    sinks = draw(random, 4) if options.pop("sinks", False) else None
    start, answers, truths = 0, [], []
    for tokens in chunks:
        arrays = step_rows(layer, random, 2, tokens)
        history.write(start, *arrays[1:])
        known = None if sinks is None else numbers(sinks)
        answers.append(quick.step(0, *map(np.array, arrays), 0.6, sinks=known, **options))
        truths.append(history.attend(start, arrays[0], 0.6, sinks, **options))
        start += tokens
    return np.concatenate(answers, 2), np.concatenate(truths, 2)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sinks": True},
        {"softcap": 1.5},
        {"kv_dtype": "float16", "dtype": mx.float16},
        {"kv_dtype": "bfloat16", "dtype": mx.bfloat16, "sinks": True, "softcap": 0.5},
    ],
    ids=str,
)
def test_the_array_oracle_is_the_brute_force_one(window: int, options: dict[str, Any]) -> None:
    quick, truth = array_oracle(window, [5, 1, 2], **dict(options))
    assert np.abs(quick - truth).max() < 1e-12
    if options:
        plain, _ = array_oracle(window, [5, 1, 2])
        # A single visible row takes all the weight, so capping its score does nothing.
        if options != {"softcap": 1.5} or window != 1:
            assert np.abs(quick - plain).max() > 1e-4


def test_the_array_oracle_forgets_what_was_rewound() -> None:
    layer = Layer()
    geometry = make_cache([layer]).geometry
    random = np.random.default_rng(2)
    first, dropped, last = (
        [np.array(array) for array in step_rows(layer, random, 1, 2)] for _ in range(3)
    )
    straight = attention_oracle.AttentionOracle(geometry)
    straight.step(0, *first, 1.0)
    rewound = attention_oracle.AttentionOracle(geometry)
    rewound.step(0, *first, 1.0)
    rewound.step(0, *dropped, 1.0)
    rewound.rewind(2)
    expected = straight.step(0, *last, 1.0)
    assert (rewound.step(0, *last, 1.0) == expected).all()
    assert (rewound.step(0, *last, 1.0) != expected).any()
