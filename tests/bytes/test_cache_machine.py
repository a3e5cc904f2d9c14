"""Any sequence of calls on a cache of mixed layers, in both start forms, against the oracle."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mlx_kvcache.errors import CapacityError
from tests.support.sequence_oracle import DTYPES, Question, Session, Shape

pytestmark = pytest.mark.slow

SHAPES = st.lists(
    st.builds(
        Shape,
        window=st.sampled_from([0, 0, 1, 2, 3, 5, 8]),
        kv_heads=st.integers(1, 2),
        key_dim=st.integers(1, 3),
        value_dim=st.integers(0, 2),
        shared=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
QUESTIONS = st.builds(
    Question,
    window=st.sampled_from([None, None, None, 1, 2, 4, 7, 30]),
    as_array=st.booleans(),
    decoys=st.lists(st.integers(1, 4), max_size=1).map(tuple),
)
FLOATS = st.sampled_from(list(DTYPES.values()))


class CacheMachine(RuleBasedStateMachine):
    """Drives one session, which asserts."""

    @initialize(
        shapes=SHAPES,
        batch=st.integers(1, 3),
        capacity=st.sampled_from([1, 7, 20, 33, 100, 1000]),
        spare=st.integers(1, 6),
        initial_capacity=st.sampled_from([0, 1, 3, 4, 10, 512]),
        kv_dtype=st.sampled_from([None, None, "float32", "float16", "bfloat16"]),
    )
    def begin(self, shapes: list[Shape], **choices: object) -> None:
        self.session = Session(shapes, **choices)
        largest = max((self.session.ring_size(layer) for layer in self.session.layers), default=0)
        self.largest_step = max(6, 2 * largest + 2)

    def _questions(self, data: st.DataObject) -> list[Question | None]:
        """Each policy asks for nothing, for one mask that is shared, or for each layer's own."""
        windows = [shape.window for shape in self.session.shapes]
        modes = {
            window: data.draw(st.sampled_from(["none", "first", "each"]), f"window {window} asks")
            for window in sorted(set(windows))
        }
        mask = {window: data.draw(QUESTIONS) for window in sorted(set(windows))}
        questions: list[Question | None] = []
        for layer, window in enumerate(windows):
            mode = modes[window]
            if mode == "each":
                questions.append(data.draw(QUESTIONS, f"layer {layer} asks"))
            else:
                first = windows.index(window) == layer
                questions.append(mask[window] if mode == "first" and first else None)
        return questions

    @precondition(lambda self: self.session.room > 0)
    @rule(data=st.data(), flush=st.booleans())
    def step(self, data: st.DataObject, flush: bool) -> None:
        session = self.session
        count = data.draw(st.integers(1, min(self.largest_step, session.room)), "tokens")
        reserve = None
        if data.draw(st.integers(0, 9)) == 0:
            after = data.draw(st.integers(0, len(session.shapes) - 1), "reserve after layers")
            reserve = after, data.draw(st.integers(0, session.config.capacity), "reserve")
        session.step(count, self._questions(data), reserve=reserve)
        if flush:
            session.flush()

    @precondition(lambda self: self.session.room > 0)
    @rule(data=st.data(), repeat=st.integers(1, 12), hold=st.booleans())
    def decode(self, data: st.DataObject, repeat: int, hold: bool) -> None:
        questions = self._questions(data)
        for _ in range(min(repeat, self.session.room)):
            self.session.step(1, questions)
            if hold:
                self.session.hold()
        self.session.flush()

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        length = self.session.length
        position = data.draw(st.integers(max(0, length - 8), length), "position")
        one_by_one = data.draw(st.none() | st.permutations(self.session.layers), "one by one")
        self.session.rewind(position, one_by_one)

    @precondition(lambda self: self.session.room > 0 and len(self.session.shapes) > 1)
    @rule(data=st.data())
    def torn_step(self, data: st.DataObject) -> None:
        session = self.session
        position = session.length
        count = data.draw(st.integers(1, min(self.largest_step, session.room)), "tokens")
        written = data.draw(st.permutations(session.layers), "order")
        written = written[: data.draw(st.integers(1, len(written) - 1), "layers written")]
        questions = self._questions(data)
        session.step(count, questions, written)
        missing = [layer for layer in session.layers if layer not in written]
        for layer in missing:
            session.is_refused(layer, count + 1)
        for layer in written:
            session.is_refused(layer, data.draw(st.integers(1, 3), "tokens further ahead"))
        one_by_one = data.draw(st.none() | st.permutations(session.layers), "one by one")
        if session.can_rewind(position):
            assert session.rewind(position, one_by_one)
        else:
            assert not session.rewind(position)
            session.clear()

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        session = self.session
        session.clear()
        session.batch = data.draw(st.integers(1, 3), "batch")
        self.change_dtypes(data)

    @rule(data=st.data())
    def change_dtypes(self, data: st.DataObject) -> None:
        pairs = st.tuples(FLOATS, FLOATS) | FLOATS.map(lambda dtype: (dtype, dtype))
        self.session.dtypes = [data.draw(pairs, "dtypes") for _ in self.session.shapes]

    @rule()
    def fork(self) -> None:
        self.session.fork()

    @rule(data=st.data())
    def beyond_capacity(self, data: st.DataObject) -> None:
        session = self.session
        session.flush()
        layer = data.draw(st.sampled_from(session.layers), "layer")
        keys, values = map(mx.array, session.rows(layer, session.room + 1))
        for cache in session.caches:
            before = [layer.offset for layer in cache.layers], cache.nbytes, cache.length
            with pytest.raises(CapacityError, match=str(session.config.capacity)):
                cache.layer(layer).update_and_fetch(keys, values)
            with pytest.raises(CapacityError, match=str(session.config.capacity)):
                cache.reserve(session.config.capacity + 1)
            after = [layer.offset for layer in cache.layers], cache.nbytes, cache.length
            assert after == before

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.flush()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=14, report_multiple_bugs=False)
