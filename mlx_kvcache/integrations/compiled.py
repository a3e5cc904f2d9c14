"""The compiled decode step: a model whose graph is built once for many tokens.

A small model on a fast machine is bound by the Python that builds the graph of each token. Here
`mx.compile` keeps that graph: its inputs are the tokens, the position, the cache's buffers, the
recurrent states and the weights; its outputs the logits and the buffers after the step. What else
a trace depends on is its `StepForm`: each form is traced once.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as memoized
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import CacheList

from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.cache.step import PolicySteps
from mlx_kvcache.cache.traced import PolicyForm, TracedLayer, TracedSteps
from mlx_kvcache.errors import TracingError
from mlx_kvcache.integrations.agreement import logits_agree
from mlx_kvcache.integrations.mlx_lm import PromptCache
from mlx_kvcache.integrations.tracing import weight_places
from mlx_kvcache.store.choice import prefers_array_start
from mlx_kvcache.store.ops import with_rows

#: The most tokens of a compiled step. Longer ones are bound by their arithmetic.
MOST_TOKENS = 8
#: A form is compiled when it is asked for so many times: a trace takes as long as some 50 tokens
#: save, and a prompt's last few tokens are one step of a form that may never come again.
WORTH_COMPILING = 4
#: The forms that are kept, those last used: rows that are read, tokens, kinds of caches.
MOST_FORMS = 64

#: Rows that a flat layer answers with when it is tried whether the model minds how many they are.
MANY_ROWS = 4096
#: After which a user is told what it is that takes so long.
PATIENCE_SECONDS = 1.0

#: Path and value of each attribute of a recurrent state; an array stands as this.
ARRAY = "array"
Attributes = tuple[tuple[str, Any], ...]


class StateForm(NamedTuple):
    """A recurrent entry of the cache list: what its arrays are put back into."""

    kind: type
    attributes: Attributes


class StepForm(NamedTuple):
    """What a trace takes for granted; all else is an array.

    policies: distinct. layers: which of them each layer follows. states: recurrent entries.
    entries: the cache list, as the index of a layer, -1 less that of a state, or a tuple of these
    for the children of a `CacheList`.
    """

    tokens: int
    policies: tuple[PolicyForm, ...]
    layers: tuple[int, ...]
    states: tuple[StateForm, ...]
    entries: tuple[Any, ...]


class _Step(NamedTuple):
    """A step that can be compiled, and the objects that it moves."""

    form: StepForm
    layers: tuple[SequenceLayer, ...]
    states: list[Any]
    arrays: list[list[mx.array]]


class CompiledModel:
    """An mlx-lm model, whose short steps on a cache of ours run compiled.

    It takes the model's place in mlx-lm's functions and in ours: attributes, parameters and
    `make_cache` are the model's. Prompt chunks, steps that let the cache grow, other caches and
    other arguments run as ever. The weights are read anew at each step.

    A model that cannot be traced, since it needs the position as a number, runs uncompiled:
    `refusal` says why, once there is a reason, and `notify` is told once.
    """

    def __init__(self, model: Module, notify: Callable[[str], None] | None = None) -> None:
        self._model = model
        self.refusal: str | None = None
        #: How often a step was traced.
        self.traces = 0
        self._notify = notify or _warn
        self._asked: Counter[StepForm] = Counter()
        self._functions: OrderedDict[StepForm, Callable[..., Any]] = OrderedDict()
        self._checked: set[StepForm] = set()
        # A trace puts its arrays in the place of a model's weights, which no other thread may see.
        self._twins = threading.local()
        self._weights: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        return CompiledModel(copy.deepcopy(self._model, memo), self._notify)

    def __call__(self, inputs: mx.array, cache: Any = None, **others: Any) -> Any:
        """As the model: logits [B, T, vocabulary], of tokens [B, T]."""
        if cache is None or others or self.refusal is not None:
            return self._model(inputs, cache=cache, **others)
        step = self._step(inputs, cache)
        if step is not None:
            return self._run(step, inputs, cache)
        if self._functions:
            self._look_at_weights()
        return self._model(inputs, cache=cache)

    def _step(self, inputs: mx.array, cache: Sequence[Any]) -> _Step | None:
        """The step if it can be compiled, and is worth it; None if not."""
        if inputs.ndim != 2 or inputs.shape[1] > MOST_TOKENS:
            return None
        layers: list[SequenceLayer] = []
        states: list[Any] = []
        entries = tuple([_noted(entry, layers, states) for entry in cache])
        if not layers:
            return None
        first = layers[0]
        sequence, position, tokens = first.sequence, first.offset, inputs.shape[1]
        if (
            len(layers) != len(sequence.layers)
            or not 0 < position == sequence.length
            or position + tokens > sequence.room
            or sequence.unwritten
            or first.batch != inputs.shape[0]
        ):
            return None
        policies: dict[tuple[PolicySteps, bool], int] = {}
        order = []
        for index, layer in enumerate(layers):
            if layer.sequence is not sequence or layer.index != index:
                return None
            key = layer.steps, layer.heeds_model_window
            order.append(policies.setdefault(key, len(policies)))
        forms = []
        for steps, heeds in policies:
            rows = steps.traceable_rows(position, tokens)
            if not rows:
                return None
            forms.append(PolicyForm(steps.window, steps.ring_size, rows, heeds))
        state_forms, arrays = _described(states)
        form = StepForm(tokens, tuple(forms), tuple(order), state_forms, entries)
        if form not in self._functions and not self._is_worth(form):
            return None
        return _Step(form, tuple(layers), states, arrays)

    def _is_worth(self, form: StepForm) -> bool:
        self._asked[form] += 1
        if self._asked[form] < WORTH_COMPILING:
            return False
        reason = compiler_refusal()
        if reason is not None:
            self._refuse(reason)
        return reason is None

    def _run(self, step: _Step, inputs: mx.array, cache: Sequence[Any]) -> Any:
        form, layers = step.form, step.layers
        function = self._function(form)
        position = layers[0].offset
        try:
            logits, keys, values, arrays = function(
                inputs,
                mx.array([position]),
                [layer.store.keys for layer in layers],
                [layer.store.values for layer in layers],
                step.arrays,
                self._weights_now(),
            )
        except Exception as error:
            # Nothing has been moved yet. What the model itself raises is no reason to refuse.
            answer = self._model(inputs, cache=cache)
            self._refuse(f"it cannot be traced ({type(error).__name__}: {error})")
            return answer
        if form not in self._checked:
            former = [dict(vars(entry)) for entry in step.states]
            _commit(step, keys, values, arrays)
            return self._checked_answer(step, logits, former, inputs, cache)
        _commit(step, keys, values, arrays)
        return logits

    def _checked_answer(
        self,
        step: _Step,
        logits: mx.array,
        former: list[dict[str, Any]],
        inputs: mx.array,
        cache: Sequence[Any],
    ) -> mx.array:
        """What the model itself answers, against which the first step of a trace is held.

        A model that counts the rows it is answered, in place of asking for the offset, is traced
        without a word, and goes wrong as rows of later steps are among them.
        """
        with self._patience():
            # In this order, so that no buffer is held twice and copied.
            mx.eval(logits)
        position = step.layers[0].offset - step.form.tokens
        step.layers[0].sequence.rewind(position)
        for layer in step.layers:
            layer.settle(position)
        for entry, attributes in zip(step.states, former, strict=True):
            vars(entry).update(attributes)
        answers = [logits]
        if not self._checked:
            answers.append(self._with_more_rows(step, inputs))
            mx.eval(answers)
        answer: mx.array = self._model(inputs, cache=cache)
        if all(logits_agree(each, answer) for each in answers):
            self._checked.add(step.form)
        else:
            self._refuse("it counts the rows that it is answered, or changes more than its cache")
        return answer

    def _with_more_rows(self, step: _Step, inputs: mx.array) -> mx.array:
        """The logits of a step whose flat layers answer with many rows that nobody may see."""
        policies = tuple(
            each if each.ring_size else each._replace(rows=max(MANY_ROWS, 4 * each.rows))
            for each in step.form.policies
        )
        pairs = [
            (with_rows(keys, policies[policy].rows), with_rows(values, policies[policy].rows))
            for policy, (keys, values) in zip(
                step.form.layers, [layer.store.state for layer in step.layers], strict=True
            )
        ]
        position = mx.array([step.layers[0].offset])
        form = step.form._replace(policies=policies)
        keys, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        answer: mx.array = self._trace(
            form, inputs, position, keys, values, step.arrays, self._weights_now()
        )[0]
        return answer

    def _weights_now(self) -> list[mx.array]:
        return [place[name] for place, name in self._weights]

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Say it when this takes long: on a CPU, MLX has a C++ compiler make kernels."""
        timer = threading.Timer(
            PATIENCE_SECONDS,
            self._notify,
            ["compiling the decode step; what MLX compiles for it is kept on disk for later runs"],
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _look_at_weights(self) -> None:
        """Begin anew when modules were exchanged. A prompt comes by here before its answer does."""
        places = weight_places(self._model)
        if [(id(place), name) for place, name in places] != [
            (id(place), name) for place, name in self._weights
        ]:
            self._functions.clear()
            self._checked.clear()
            self._twins = threading.local()
            self._weights = places

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        kind = f"{type(self._model).__module__}.{type(self._model).__name__}"
        self._notify(f"{kind} runs uncompiled: {reason}")

    def _function(self, form: StepForm) -> Callable[..., Any]:
        if not self._weights:
            self._weights = weight_places(self._model)
        if form not in self._functions:
            while len(self._functions) >= MOST_FORMS:
                self._checked.discard(self._functions.popitem(last=False)[0])

            def traced(*arguments: Any) -> Any:
                self.traces += 1
                return self._trace(form, *arguments)

            self._functions[form] = mx.compile(traced)
        self._functions.move_to_end(form)
        return self._functions[form]

    def _trace(
        self,
        form: StepForm,
        inputs: mx.array,
        position: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        arrays: list[list[mx.array]],
        weights: list[mx.array],
    ) -> tuple[Any, ...]:
        """One step of the model in arrays alone: logits, keys, values, and recurrent states."""
        model = self._twin(weights)
        steps = [TracedSteps(policy, position, form.tokens) for policy in form.policies]
        layers = [
            TracedLayer(steps[policy], layer_keys, layer_values)
            for policy, layer_keys, layer_values in zip(form.layers, keys, values, strict=True)
        ]
        states = []
        for state, held in zip(form.states, arrays, strict=True):
            entry: Any = object.__new__(state.kind)
            vars(entry).update(_attributes(state, held))
            states.append(entry)
        logits = model(inputs, cache=[_rebuilt(entry, layers, states) for entry in form.entries])
        if not isinstance(logits, mx.array) or not all(layer.is_written for layer in layers):
            raise TracingError("a layer is not written, or the answer is no array of logits")
        forms, after = _described(states)
        if forms != form.states:
            raise TracingError("a recurrent state changes in more than its arrays")
        return logits, [each.keys for each in layers], [each.values for each in layers], after

    def _twin(self, weights: list[mx.array]) -> Module:
        """A copy of the model with these weights, which are those of a trace."""
        twin: Module | None = getattr(self._twins, "model", None)
        if twin is None:
            twin = self._twins.model = copy.deepcopy(self._model)
        for (place, name), array in zip(weight_places(twin), weights, strict=True):
            place[name] = array
        return twin


#: What runs tokens on a cache.
Model = Module | CompiledModel


def compiled(model: Model, notify: Callable[[str], None] | None = None) -> CompiledModel:
    """The model, to be passed to mlx-lm's functions and to ours, with compiled decode steps.

    notify: is told, once, why a model runs uncompiled; a warning if None.
    """
    return model if isinstance(model, CompiledModel) else CompiledModel(model, notify)


def is_worth_compiling(cache: PromptCache) -> bool:
    """Whether compiled steps are the default for a cache: where building the graph takes long.

    On a CPU they were measured to win; on a GPU, where they were not, so it should be for models
    that the host has more to do for than the GPU.
    """
    return prefers_array_start(cache.sequence.geometry, cache.sequence.config)


@memoized
def compiler_refusal() -> str | None:
    """Why MLX cannot compile here; None if it can. On a CPU it calls a C++ compiler."""

    def fused(array: mx.array) -> mx.array:
        return mx.exp(array) * 2 + 1

    try:
        mx.eval(mx.compile(fused)(mx.array([1.0])))
    except RuntimeError as error:
        return f"MLX cannot compile here ({error}); on a CPU it needs a C++ compiler (g++)"
    return None


def _commit(
    step: _Step, keys: list[mx.array], values: list[mx.array], arrays: list[list[mx.array]]
) -> None:
    """Let the cache hold what a step has made of it; an interrupt leaves one to be rewound."""
    first, tokens = step.layers[0], step.form.tokens
    position = first.offset
    for steps in {layer.steps for layer in step.layers}:
        steps.forget()
    first.sequence.begin(position, tokens)
    for entry, held, state in zip(step.states, arrays, step.form.states, strict=True):
        vars(entry).update(_attributes(state, held))
    for layer, layer_keys, layer_values in zip(step.layers, keys, values, strict=True):
        layer.take(layer_keys, layer_values, position + tokens)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)


def _noted(entry: Any, layers: list[SequenceLayer], states: list[Any]) -> Any:
    """The place of an entry of the cache list, which is added to the layers or the states."""
    if isinstance(entry, SequenceLayer):
        layers.append(entry)
        return len(layers) - 1
    if isinstance(entry, CacheList):
        return tuple([_noted(child, layers, states) for child in entry.caches])
    states.append(entry)
    return -len(states)


def _rebuilt(entry: Any, layers: Sequence[TracedLayer], states: Sequence[Any]) -> Any:
    """What stands at a place that `_noted` has answered."""
    if isinstance(entry, tuple):
        return CacheList(*(_rebuilt(child, layers, states) for child in entry))
    return layers[entry] if entry >= 0 else states[-entry - 1]


def _described(states: Sequence[Any]) -> tuple[tuple[StateForm, ...], list[list[mx.array]]]:
    """The forms of recurrent entries, and their arrays."""
    forms, arrays = [], []
    for entry in states:
        leaves: Any = tree_flatten(vars(entry))
        held = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
        attributes = tuple(
            [(path, ARRAY if isinstance(leaf, mx.array) else leaf) for path, leaf in leaves]
        )
        forms.append(StateForm(type(entry), attributes))
        arrays.append(held)
    return tuple(forms), arrays


def _attributes(state: StateForm, arrays: Sequence[mx.array]) -> dict[str, Any]:
    """The attributes of a recurrent entry with these arrays."""
    held = iter(arrays)
    leaves = [(path, next(held) if leaf is ARRAY else leaf) for path, leaf in state.attributes]
    attributes: dict[str, Any] = tree_unflatten(leaves)
    return attributes
