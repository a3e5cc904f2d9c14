"""A compiled model answers what the model does, whatever happens to its cache in between."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

import mlx_kvcache
from mlx_kvcache import CompiledModel, PromptCache, compiled, make_prompt_cache
from mlx_kvcache.cache import step as step_module
from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.errors import TracingError, UpdateShapeError
from mlx_kvcache.integrations import compiled as compiled_module
from mlx_kvcache.layout import runs
from tests.support.interrupts import Fuse
from tests.support.tiny_models import all_families, build, random_tokens

TOLERANCE = 1e-4
#: A flat model, rings, layers that share rows, latent attention, and a hybrid.
KINDS = ("qwen3", "gemma3_text", "gemma3n", "deepseek_v3", "qwen3_next")
RINGS = ("gemma3_text", "gemma3n")
ROLLBACK = ("qwen3", "gemma3_text", "gemma3n", "deepseek_v3")


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch):
    """Rows are read eight at a time, so that a short run passes many of these bounds."""
    monkeypatch.setattr(runs, "READ_ROWS", 8)
    monkeypatch.setattr(compiled_module, "WORTH_COMPILING", 2)


def model_of(name: str) -> nn.Module:
    return build(name, all_families()[name])


def cache_of(model: Any, **choices: Any) -> PromptCache:
    return make_prompt_cache(model, **{"initial_capacity": 24, "spare": 9, **choices})


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Collects how many tokens each uncompiled pass of a model has."""
    passes: list[int] = []
    original = type(model).__call__

    def call(self: Any, inputs: mx.array, *arguments: Any, **choices: Any) -> Any:
        if self is model:
            passes.append(inputs.shape[1])
        return original(self, inputs, *arguments, **choices)

    with patch.object(type(model), "__call__", call):
        yield passes


def difference(got: mx.array, expected: mx.array) -> float:
    known = mx.isfinite(expected)
    assert mx.array_equal(known, mx.isfinite(got))
    return float(mx.where(known, mx.abs(got - expected), 0).max())


@pytest.mark.parametrize("name", KINDS)
def test_the_same_logits_past_wraps_and_growth(name):
    model = model_of(name)
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 70, seed=1)
    ours, theirs = cache_of(model), cache_of(model)
    with counted(model) as passes:
        got = in_steps(fast, tokens, ours)
        eager = len(passes)
        expected = in_steps(model, tokens, theirs)
    assert difference(got, expected) <= TOLERANCE
    # The prompt, the first steps of a form, the check of each trace, and the growths.
    assert eager < 30
    assert fast.traces >= 3
    rings = [layer for layer in ours.sequence.layers if layer.steps.ring_size]
    assert all(layer.offset > 2 * layer.steps.ring_size for layer in rings)
    assert bool(rings) == (name in RINGS)
    for one, other in zip(ours.sequence.state, theirs.sequence.state, strict=True):
        assert difference(one, other) <= TOLERANCE
    changed = [*tokens[:20], tokens[20] ^ 1, *tokens[21:]]
    other = in_steps(fast, changed, cache_of(model))
    assert difference(other[:, 21], got[:, 21]) > 100 * TOLERANCE


def in_steps(model: Any, tokens: list[int], cache: PromptCache, prompt: int = 9) -> mx.array:
    """The logits of a prompt and of single tokens after it."""
    pieces = [model(mx.array([tokens[:prompt]]), cache=cache)]
    for token in tokens[prompt:]:
        pieces.append(model(mx.array([[token]]), cache=cache))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces, axis=1)


class Pair:
    """A cache that a compiled model fills, and one that the model itself does."""

    def __init__(self, name: str) -> None:
        self.model = model_of(name)
        self.fast = compiled(self.model, pytest.fail)
        self.caches = cache_of(self.model), cache_of(self.model)
        self.forks: list[tuple[PromptCache, PromptCache]] = []

    def feed(self, tokens: list[int]) -> None:
        inputs = mx.array([tokens])
        got = self.fast(inputs, cache=self.caches[0])
        expected = self.model(inputs, cache=self.caches[1])
        assert difference(got, expected) <= TOLERANCE

    def rewind(self, count: int) -> None:
        length = self.caches[1].length
        floor = max(self.caches[1].sequence.rewind_floor, 1)
        target = max(floor, length - count)
        if target <= length:
            for cache in self.caches:
                cache.rewind(target)

    def fork(self) -> None:
        self.forks.append(self.caches)
        self.caches = self.caches[0].fork(), self.caches[1].fork()

    def turn(self) -> None:
        if self.forks:
            self.forks.append(self.caches)
            self.caches = self.forks.pop(0)


VERBS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 12)),
        st.tuples(st.just("chunk"), st.integers(2, 20)),
        st.tuples(st.just("verify"), st.integers(2, 8)),
        st.tuples(st.just("rewind"), st.integers(1, 9)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("turn"), st.just(0)),
    ),
    min_size=5,
    max_size=25,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROLLBACK)
def test_any_history_gives_the_same_logits(name):
    pair = Pair(name)
    traces = wraps = 0

    @settings(max_examples=20, deadline=None)
    @given(verbs=VERBS, seed=st.integers(0, 2**31))
    def run(verbs, seed):
        nonlocal traces, wraps
        numbers = np.random.default_rng(seed)
        pair.caches, pair.forks = (cache_of(pair.model), cache_of(pair.model)), []
        pair.feed([int(token) for token in numbers.integers(0, 50, 5)])
        for verb, count in verbs:
            if verb == "decode":
                for token in numbers.integers(0, 50, count):
                    pair.feed([int(token)])
            elif verb in ("chunk", "verify"):
                pair.feed([int(token) for token in numbers.integers(0, 50, count)])
            elif verb == "rewind":
                pair.rewind(count)
            else:
                getattr(pair, verb)()
        traces = pair.fast.traces
        rings = [layer for layer in pair.caches[0].sequence.layers if layer.steps.ring_size]
        wraps += any(layer.offset > layer.steps.ring_size for layer in rings)

    run()
    assert traces > 5
    assert (wraps > 5) == (name in RINGS)


@pytest.mark.parametrize("tokens", [2, 5, 8])
@pytest.mark.parametrize("name", ROLLBACK)
def test_several_tokens_at_once_are_compiled_too(name, tokens, monkeypatch):
    monkeypatch.setattr(runs, "READ_ROWS", 128)
    pair = Pair(name)
    pair.caches = tuple(cache_of(pair.model, initial_capacity=128) for _ in range(2))
    ids = random_tokens(pair.model, 5 + 12 * tokens, seed=3)
    pair.feed(ids[:5])
    with counted(pair.model) as passes:
        for step in range(12):
            before = len(passes)
            pair.feed(ids[5 + step * tokens : 5 + (step + 1) * tokens])
            compiled_alone = len(passes) - before == 1
    assert pair.fast.traces
    assert compiled_alone


def test_a_step_larger_than_the_spare_rows_runs_uncompiled():
    pair = Pair("gemma3_text")
    pair.caches = cache_of(pair.model, spare=3), cache_of(pair.model, spare=3)
    ids = random_tokens(pair.model, 80, seed=3)
    for begin in range(0, 80, 4):
        pair.feed(ids[begin : begin + 4])
    assert pair.caches[0].length == 80
    assert not pair.fast.traces


@pytest.mark.parametrize("name", KINDS)
def test_mlx_lms_loop_gives_the_same_tokens(name):
    model = model_of(name)
    fast = compiled(model, pytest.fail)
    prompt = mx.array(random_tokens(model, 20, seed=2))

    def run(model: Any, cache: Any) -> list[int]:
        steps = generate_step(prompt, model, max_tokens=60, prompt_cache=cache)
        return [int(token) for token, _ in steps]

    expected = run(model, make_mlx_lm_cache(model))
    assert run(fast, cache_of(fast)) == expected
    assert fast.traces
    assert run(fast, make_mlx_lm_cache(fast)) == expected


@pytest.mark.parametrize("name", [name for name in ROLLBACK if name != "gemma3n"])
def test_mlx_lms_speculative_loop_gives_the_greedy_tokens(name):
    """It hands the model a slice of the list, a plain one, with an entry for each layer."""
    model = model_of(name)
    draft = build("qwen3", {**all_families()["qwen3"], "vocab_size": model_vocabulary(model)})
    fast, fast_draft = compiled(model, pytest.fail), compiled(draft, pytest.fail)
    prompt = mx.array(random_tokens(model, 20, seed=2))
    steps = generate_step(prompt, model, max_tokens=40, prompt_cache=make_mlx_lm_cache(model))
    expected = [int(token) for token, _ in steps]
    cache = [*cache_of(model), *cache_of(draft)]
    guesses = speculative_generate_step(
        prompt, fast, fast_draft, num_draft_tokens=3, max_tokens=40, prompt_cache=cache
    )
    assert [int(token) for token, _, _ in guesses] == expected
    assert fast.traces
    assert fast_draft.traces


def model_vocabulary(model: nn.Module) -> int:
    return int(model(mx.zeros((1, 1), mx.int32)).shape[-1])


def test_the_models_attributes_reach_through():
    model = model_of("qwen3")
    fast = compiled(model)
    assert compiled(fast) is fast
    assert fast.layers is model.layers or fast.layers == model.layers
    assert fast.model is model.model
    assert fast.args is model.args
    assert fast.parameters().keys() == model.parameters().keys()
    assert mlx_kvcache.CompiledModel is CompiledModel
    with pytest.raises(AttributeError, match="no_such_thing"):
        fast.no_such_thing  # noqa: B018


@pytest.mark.parametrize("change", ["in place", "another array", "another module"])
def test_changed_weights_are_used(change):
    model = model_of("qwen3")
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 60, seed=1)
    before = in_steps(fast, tokens, cache_of(model))
    projection = model.model.layers[0].mlp.down_proj
    if change == "in place":
        projection.weight[:] = projection.weight * 0.5
    elif change == "another array":
        projection.weight = projection.weight * 0.5
    else:
        half = nn.Linear(projection.weight.shape[1], projection.weight.shape[0], bias=False)
        half.weight = projection.weight * 0.5
        model.model.layers[0].mlp.down_proj = half
    traces = fast.traces
    after = in_steps(fast, tokens, cache_of(model))
    assert difference(after, in_steps(model, tokens, cache_of(model))) <= TOLERANCE
    assert difference(after, before) > 100 * TOLERANCE
    assert (fast.traces > traces) == (change == "another module")


def test_a_model_that_looks_into_its_linear_layers_is_traced_with_them_as_they_are():
    """Their weights are given transposed otherwise, and this one's are square."""
    model = model_of("qwen3")
    looked_at = nn.Linear(16, 16, bias=False)
    mx.eval(looked_at.parameters())
    model.looked_at = looked_at
    original = type(model).__call__

    def call(self: Any, inputs: mx.array, *arguments: Any, **choices: Any) -> Any:
        logits = original(self, inputs, *arguments, **choices)
        return logits + (self.looked_at.weight[0] * 3).sum()

    with patch.object(type(model), "__call__", call):
        fast = compiled(model, pytest.fail)
        tokens = random_tokens(model, 60, seed=1)
        got = in_steps(fast, tokens, cache_of(model))
        assert difference(got, in_steps(model, tokens, cache_of(model))) <= TOLERANCE
    assert not fast._turned
    assert fast.traces >= 3


def test_a_model_that_needs_a_number_says_so_once():
    model = model_of("internlm2")
    told: list[str] = []
    fast = compiled(model, told.append)
    tokens = random_tokens(model, 40, seed=1)
    got = in_steps(fast, tokens, cache_of(model))
    assert mx.array_equal(got, in_steps(model, tokens, cache_of(model)))
    in_steps(fast, tokens, cache_of(model))
    assert len(told) == 1
    assert fast.refusal is not None
    assert fast.refusal in told[0]
    assert fast.traces == 2
    with pytest.warns(RuntimeWarning, match="runs uncompiled"):
        in_steps(compiled(model), tokens, cache_of(model))


def test_a_model_that_counts_rows_is_found_out():
    """afm7 takes the position of its queries from the number of keys."""
    model = model_of("afm7")
    told: list[str] = []
    fast = compiled(model, told.append)
    tokens = random_tokens(model, 40, seed=1)
    got = in_steps(fast, tokens, cache_of(model))
    assert difference(got, in_steps(model, tokens, cache_of(model))) <= TOLERANCE
    assert "counts the rows" in told[0]
    with patch.object(compiled_module, "logits_agree", return_value=True):
        trusted = in_steps(compiled(model, pytest.fail), tokens, cache_of(model))
    assert difference(trusted, got) > 100 * TOLERANCE


def test_a_state_that_cannot_be_compared_runs_uncompiled():
    model = model_of("qwen3_next")
    told: list[str] = []
    fast = compiled(model, told.append)
    caches = [cache_of(model) for _ in range(2)]
    for cache in caches:
        cache.recurrent[0].seen = {1, 2}
    tokens = random_tokens(model, 40, seed=1)
    assert mx.array_equal(in_steps(fast, tokens, caches[0]), in_steps(model, tokens, caches[1]))
    assert len(told) == 1
    assert "cannot be told" in told[0]


def test_weights_that_the_model_has_let_go_are_not_held():
    model = model_of("qwen3")
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 60, seed=1)
    table = mx.zeros((50_000, 16))
    mx.eval(table)
    model.table = table
    in_steps(fast, tokens, cache_of(model))
    size = table.nbytes
    held = mx.get_active_memory()
    model.table = mx.zeros((1, 1))
    del table
    in_steps(fast, tokens[:9], cache_of(model))
    mx.clear_cache()
    assert fast.traces
    assert mx.get_active_memory() < held - size // 2


def test_a_copied_cache_goes_its_own_way():
    model = model_of("gemma3_text")
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 60, seed=1)
    cache = cache_of(model)
    in_steps(fast, tokens[:50], cache)
    twin = copy.deepcopy(cache)
    expected = in_steps(model, tokens, cache_of(model))
    other = in_steps(model, [*tokens[:50], 3, 4, 5], cache_of(model))
    for place in range(3):
        got = fast(mx.array([[tokens[50 + place]]]), cache=cache)
        assert difference(got[:, 0], expected[:, 50 + place]) <= TOLERANCE
        got = fast(mx.array([[3 + place]]), cache=twin)
        assert difference(got[:, 0], other[:, 50 + place]) <= TOLERANCE
    assert difference(other[:, 52], expected[:, 52]) > 100 * TOLERANCE


def test_a_refused_step_changes_nothing_and_is_no_refusal_of_the_model():
    model = model_of("qwen3")
    fast = compiled(model, pytest.fail)
    cache = cache_of(model)
    tokens = random_tokens(model, 40, seed=1)
    in_steps(fast, tokens, cache)
    with pytest.raises(UpdateShapeError, match="batch"):
        fast(mx.array([[1], [2]]), cache=cache)
    assert cache.length == 40
    assert fast.refusal is None
    expected = in_steps(model, [*tokens, 3], cache_of(model))
    assert difference(fast(mx.array([[3]]), cache=cache)[:, 0], expected[:, -1]) <= TOLERANCE


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_rows_of_another_dtype(kv_dtype):
    model = model_of("gemma3_text")
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 70, seed=1)
    ours, theirs = cache_of(model, kv_dtype=kv_dtype), cache_of(model, kv_dtype=kv_dtype)
    assert difference(in_steps(fast, tokens, ours), in_steps(model, tokens, theirs)) <= 0.02
    assert fast.traces
    assert {array.dtype for array in ours.sequence.state} == {getattr(mx, kv_dtype)}


def test_a_batch_and_other_windows():
    model = model_of("gemma3_text")
    fast = compiled(model, pytest.fail)
    rows = mx.array([random_tokens(model, 60, seed=seed) for seed in (1, 2, 3)])
    caches = [cache_of(model, windows=[5]) for _ in range(2)]
    for begin, end in [(0, 9), *((i, i + 1) for i in range(9, 60))]:
        got = fast(rows[:, begin:end], cache=caches[0])
        expected = model(rows[:, begin:end], cache=caches[1])
        assert difference(got, expected) <= TOLERANCE
    assert fast.traces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_an_interrupt_at_any_point_is_taken_back_or_never_happened(name):
    """In a step that is traced and checked, and in one that is replayed."""
    model = model_of(name)
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 60, seed=1)
    expected = in_steps(model, tokens, cache_of(model))
    cache = cache_of(model)
    in_steps(fast, tokens[:40], cache)
    start = cache.snapshot()
    step = mx.array([[tokens[40]]])
    unfinished = 0
    for is_checked in (False, True):
        interrupted = 0
        for at in range(0, 100_000, 1 if is_checked else 7):
            if not is_checked:
                fast._checked.clear()
            base = cache.fork()
            fuse = Fuse(at)
            try:
                fuse.call(lambda base=base: fast(step, cache=base))
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
            unfinished += bool(base.sequence.layout.unwritten)
            if base.sequence.layout.unwritten or (base.recurrent and base.length == 40):
                # Within the model, nobody tells whether a recurrent state has taken its step.
                base.restore(start)
            if base.length == 40:
                fast(step, cache=base)
            for place in range(41, 44):
                got = fast(mx.array([[tokens[place]]]), cache=base)
                assert difference(got[:, 0], expected[:, place]) <= TOLERANCE, fuse.place
        assert interrupted > 60
    assert unfinished > 10
    assert fast.refusal is None


def test_two_threads_trace_the_same_model():
    model = model_of("gemma3_text")
    fast = compiled(model, pytest.fail)
    tokens = random_tokens(model, 60, seed=1)
    expected = in_steps(model, tokens, cache_of(model))
    got: list[mx.array] = []

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            answer = in_steps(fast, tokens, cache_of(model))
            mx.eval(answer)
            got.append(answer)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [difference(answer, expected) <= TOLERANCE for answer in got] == [True] * 3


@pytest.mark.slow
def test_no_pool_is_copied(monkeypatch):
    """At 65,536 rows, of which a copy of one would show in the peak."""
    monkeypatch.setattr(runs, "READ_ROWS", 256)
    model = model_of("qwen3")
    fast = compiled(model, pytest.fail)
    cache = make_prompt_cache(model, initial_capacity=65_536)
    token = mx.array([[3]])
    model(mx.array([[1, 2, 3]]), cache=cache)
    for _ in range(8):
        mx.eval(fast(token, cache=cache))
    assert fast.traces == 1
    pool = cache.sequence.layers[0].store.keys.nbytes

    def peak(step: Callable[[], mx.array]) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(step())
        return mx.get_peak_memory() - before

    assert peak(lambda: fast(token, cache=cache)) < pool // 2
    held = [*cache.sequence.state]
    assert peak(lambda: fast(token, cache=cache)) > pool
    assert len(held) == len(cache.sequence.state)


def test_a_plain_compile_over_the_layers_is_refused():
    model = model_of("gemma3_text")
    cache = cache_of(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    frozen = mx.compile(lambda inputs: model(inputs, cache=cache))
    for inputs in (mx.array([[4]]), mx.array([[4, 5]])):
        with pytest.raises(TracingError, match=r"mlx_kvcache\.compiled"):
            frozen(inputs)
        assert cache.length == 3
        assert not cache.sequence.layout.unwritten


def test_a_plain_compile_over_a_compiled_model_is_refused():
    model = model_of("qwen3")
    fast = compiled(model, pytest.fail)
    cache = cache_of(model)
    tokens = random_tokens(model, 40, seed=1)
    in_steps(fast, tokens, cache)
    outer = mx.compile(lambda inputs: fast(inputs, cache=cache))
    with pytest.raises(TracingError):
        outer(mx.array([[3]]))
    assert cache.length == 40
    expected = in_steps(model, [*tokens, 3], cache_of(model))
    assert difference(fast(mx.array([[3]]), cache=cache)[:, 0], expected[:, -1]) <= TOLERANCE


def test_a_plain_compile_over_cells_is_refused():
    model = model_of("qwen3")
    geometry = make_prompt_cache(model).sequence.geometry
    cache = MLXCellCache(geometry)
    layer = geometry.layers[0]
    rows = mx.zeros((1, layer.kv_heads, 1, layer.key_dim))
    cache.declare_step([(cache.new(), 1)])
    attend = mx.compile(lambda rows: cache.attend(0, rows, rows, rows, 1.0))
    with pytest.raises(TracingError):
        attend(rows)
    assert cache.attend(0, rows, rows, rows, 1.0).shape == rows.shape


def test_gradients_through_a_cache_are_none_of_its_business():
    model = model_of("qwen3")
    cache = cache_of(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    loss, _ = nn.value_and_grad(model, lambda model: model(mx.array([[4]]), cache=cache).sum())(
        model
    )
    assert bool(mx.isfinite(loss))
    assert cache.length == 4


def test_rows_are_read_in_growing_numbers(monkeypatch):
    monkeypatch.setattr(runs, "READ_ROWS", 256)
    assert [runs.rows_to_read(end) for end in (1, 256, 257, 4096, 4097, 8192, 8193)] == [
        256, 256, 512, 4096, 4608, 8192, 9216,
    ]  # fmt: skip
    assert all(end <= runs.rows_to_read(end) <= end + max(255, end / 8) for end in range(1, 20_000))
    assert step_module.rows_to_read is runs.rows_to_read
