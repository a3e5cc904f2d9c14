"""The compiled decode step: a model whose graph is built once for many tokens.

A small model on a fast machine is bound by the Python that builds the graph of each token. Here
`mx.compile` keeps that graph: its inputs are the tokens, the position, the cache's buffers, the
recurrent states and the weights; its outputs the logits and the buffers after the step. What else
a trace depends on is its `StepForm`: each form is traced once.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_kvcache.cache.traced import TracedLayer, TracedSteps
from mlx_kvcache.errors import ConfigError, TracingError, UnsupportedModelError
from mlx_kvcache.facts.checks import shortened
from mlx_kvcache.integrations.agreement import logits_agree
from mlx_kvcache.integrations.mlx_lm import PromptCache
from mlx_kvcache.integrations.step_forms import Members, StepForm, described
from mlx_kvcache.integrations.twin import Twins
from mlx_kvcache.store.choice import prefers_array_start
from mlx_kvcache.store.ops import with_rows
from mlx_kvcache.store.traces import refuse_traced

#: The most tokens of a compiled step. Longer ones are bound by their arithmetic.
MOST_TOKENS = 8
#: A form is compiled when it is asked for so many times: a trace takes as long as some 50 tokens
#: save, and a prompt's last few tokens are one step of a form that may never come again.
WORTH_COMPILING = 4
#: The forms that are kept, those last used: rows that are read, tokens, kinds of caches.
MOST_FORMS = 64
#: Of so many others is known how often they were asked for.
MOST_ASKED = 1024
#: Rows that a flat layer answers with when it is tried whether the model minds how many they are.
MANY_ROWS = 4096
#: After which a user is told what it is that takes so long.
PATIENCE_SECONDS = 1.0


class _Step(NamedTuple):
    """A step that is run compiled. arrays: of the recurrent states, before it."""

    form: StepForm
    members: Members
    arrays: list[list[mx.array]]


class CompiledModel:
    """An mlx-lm model, whose short steps on a cache of ours run compiled.

    It takes the model's place in mlx-lm's functions and in ours: attributes, parameters and
    `make_cache` are the model's. Prompt chunks, steps that let the cache grow, other caches and
    other arguments run as ever. The weights are looked at after each of those, so that changed
    ones are used from the next prompt on.

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
        self._turned = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget every trace."""
        self._functions: dict[StepForm, Callable[..., Any]] = {}
        self._checked: set[StepForm] = set()
        self._twins: Twins | None = None
        # None of them: they are to be looked at.
        self._weights: Sequence[mx.array] = ()

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
        self._weights = ()
        return self._model(inputs, cache=cache)

    def _step(self, inputs: mx.array, cache: Sequence[Any]) -> _Step | None:
        """The step if it can be compiled, and is worth it; None if not."""
        if inputs.ndim != 2 or inputs.shape[1] > MOST_TOKENS:
            return None
        members = Members.of(cache)
        found = None if members is None else members.form(*inputs.shape)
        if members is None or found is None:
            return None
        form, arrays = found
        try:
            is_known = form in self._functions
        except TypeError as error:
            self._refuse(f"a recurrent state cannot be told from another ({error})")
            return None
        if not is_known and not self._is_worth(form):
            return None
        return _Step(form, members, arrays)

    def _is_worth(self, form: StepForm) -> bool:
        if len(self._asked) > MOST_ASKED:
            self._asked.clear()
        self._asked[form] += 1
        return self._asked[form] >= WORTH_COMPILING

    def _run(self, step: _Step, inputs: mx.array, cache: Sequence[Any]) -> Any:
        # Within somebody's own mx.compile, the cache would be left with arrays of no value.
        refuse_traced(inputs)
        layers = step.members.layers
        weights = self._weights_now()
        function = self._function(step.form)
        try:
            logits, keys, values, arrays = function(
                inputs,
                mx.array([layers[0].offset]),
                [layer.store.keys for layer in layers],
                [layer.store.values for layer in layers],
                step.arrays,
                weights,
            )
        except Exception as error:
            # Nothing has been moved yet. What the model itself raises is no reason to refuse.
            answer = self._model(inputs, cache=cache)
            self._doubt(f"it cannot be traced ({type(error).__name__}: {error})")
            return answer
        former = [dict(vars(entry)) for entry in step.members.states]
        _commit(step, keys, values, arrays)
        if step.form in self._checked:
            return logits
        return self._checked_answer(step, logits, former, inputs, cache)

    def _weights_now(self) -> Sequence[mx.array]:
        weights = self._weights
        if not weights:
            if self._twins is not None and not self._twins.are_current:
                self._begin_anew()
            twins = self._twins = self._twins or Twins(self._model, self._turned)
            weights = self._weights = twins.weights()
        return weights

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
        layers = step.members.layers
        sequence, position = layers[0].sequence, layers[0].offset - step.form.tokens
        # To the end of it, an interrupt leaves a cache that takes no step.
        sequence.begin_rewind(position)
        for layer in layers:
            layer.settle(position)
        for entry, attributes in zip(step.members.states, former, strict=True):
            vars(entry).update(attributes)
        sequence.end_rewind()
        answers = [logits]
        if not self._checked:
            answers.append(self._with_more_rows(step, inputs))
            mx.eval(answers)
        answer: mx.array = self._model(inputs, cache=cache)
        if all(logits_agree(each, answer) for each in answers):
            self._checked.add(step.form)
        else:
            self._doubt("it counts the rows that it is answered, or changes more than its cache")
        return answer

    def _with_more_rows(self, step: _Step, inputs: mx.array) -> mx.array:
        """The logits of a step whose flat layers answer with many rows that nobody may see."""
        form, layers = step.form, step.members.layers
        policies = tuple(
            each if each.ring_size else each._replace(rows=max(MANY_ROWS, 4 * each.rows))
            for each in form.policies
        )
        keys, values = [], []
        for layer, policy in zip(layers, form.layers, strict=True):
            held_keys, held_values = layer.store.state
            keys.append(with_rows(held_keys, policies[policy].rows))
            values.append(with_rows(held_values, policies[policy].rows))
        position = mx.array([layers[0].offset])
        answer: mx.array = self._trace(
            form._replace(policies=policies), inputs, position, keys, values, step.arrays,
            self._weights_now(),
        )[0]  # fmt: skip
        return answer

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Say it on a terminal when this takes long: on a CPU, a C++ compiler makes kernels."""
        if not sys.stderr.isatty():
            yield
            return
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

    def _doubt(self, reason: str) -> None:
        """Trace anew with linear layers as they are, which some models look into; else refuse."""
        if self._turned:
            self._turned = False
            self._begin_anew()
        else:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        kind = f"{type(self._model).__module__}.{type(self._model).__name__}"
        self._notify(f"{kind} runs uncompiled: {reason}")

    def _function(self, form: StepForm) -> Callable[..., Any]:
        function = self._functions.pop(form, None)
        if function is None:

            def traced(*arguments: Any) -> Any:
                self.traces += 1
                return self._trace(form, *arguments)

            function = mx.compile(traced)
            for oldest in list(self._functions)[: 1 - MOST_FORMS]:
                self._functions.pop(oldest, None)
                self._checked.discard(oldest)
        # At the end, as the last one used.
        self._functions[form] = function
        return function

    def _trace(
        self,
        form: StepForm,
        inputs: mx.array,
        position: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        arrays: list[list[mx.array]],
        weights: Sequence[mx.array],
    ) -> tuple[Any, ...]:
        """One step of the model in arrays alone: logits, keys, values, and recurrent states."""
        assert self._twins is not None, "the weights come from there"
        steps = [TracedSteps(policy, position, form.tokens) for policy in form.policies]
        layers = [
            TracedLayer(steps[policy], layer_keys, layer_values)
            for policy, layer_keys, layer_values in zip(form.layers, keys, values, strict=True)
        ]
        states = [state.entry(held) for state, held in zip(form.states, arrays, strict=True)]
        with self._twins.model(weights) as model:
            logits = model(inputs, cache=form.cache(layers, states))
        if not isinstance(logits, mx.array) or not all(layer.is_written for layer in layers):
            raise TracingError("a layer is not written, or the answer is no array of logits")
        forms, after = described(states)
        if forms != form.states:
            raise TracingError("a recurrent state changes in more than its arrays")
        return logits, [each.keys for each in layers], [each.values for each in layers], after


#: What runs tokens on a cache.
Model = Module | CompiledModel


def compiled(model: Model, notify: Callable[[str], None] | None = None) -> CompiledModel:
    """The model, to be passed to mlx-lm's functions and to ours, with compiled decode steps.

    notify: is told, once, why a model runs uncompiled; a warning if None. Raises
    `UnsupportedModelError` for what is no model, `ConfigError` for what cannot be told anything.
    """
    if not isinstance(model, Model):
        raise UnsupportedModelError(
            f"what is compiled is a model, as mlx-lm loads it, got {shortened(model)}"
        )
    if notify is not None and not callable(notify):
        raise ConfigError(f"notify is a function of one text, got {shortened(notify)}")
    return model if isinstance(model, CompiledModel) else CompiledModel(model, notify)


def is_worth_compiling(cache: PromptCache) -> bool:
    """Whether compiled steps are the default for a cache: where building the graph takes long.

    On a CPU they were measured to win; on a GPU, where they were not, so it should be for models
    that the host has more to do for than the GPU.
    """
    return prefers_array_start(cache.sequence.geometry, cache.sequence.config)


def _commit(
    step: _Step, keys: list[mx.array], values: list[mx.array], arrays: list[list[mx.array]]
) -> None:
    """Let the cache hold what a step has made of it; an interrupt leaves one to be rewound."""
    members = step.members
    first = members.layers[0]
    position, end = first.offset, first.offset + step.form.tokens
    for steps, _ in members.policies:
        steps.forget()
    first.sequence.begin(position, step.form.tokens)
    for entry, held, state in zip(members.states, arrays, step.form.states, strict=True):
        vars(entry).update(state.with_arrays(held))
    for layer, layer_keys, layer_values in zip(members.layers, keys, values, strict=True):
        layer.take(layer_keys, layer_values, end)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
