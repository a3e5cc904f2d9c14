"""A step over unequal sequences through an mlx-lm model, which knows nothing of it.

The tokens of a flat step go in as a batch, [T, 1]: one row for each token. The layer objects give
the position of each row as `offset`, which mlx-lm's models take as an array, and hand keys and
values back as they are. The `scaled_dot_product_attention` of the model's modules is wrapped, once
and for good: in a step it turns [T, H, 1, D] into the cache's [1, H, T, D] and lets the cache
attend; everywhere else it hands on what it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from mlx_kvcache.cache.cells import MLXCellCache
from mlx_kvcache.control.protocols import StepBackend
from mlx_kvcache.errors import KVCacheError, UnsupportedModelError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerPolicy
from mlx_kvcache.integrations.agreement import logits_agree
from mlx_kvcache.integrations.tracing import TracedGeometry, trace_geometry

ATTENTION = "scaled_dot_product_attention"
#: The attribute by which a wrapper of it is known: it holds the wrapper itself.
_MARK = "_mlx_kvcache_routed"
#: What a model raises that makes something else of its cache than this protocol.
_MODEL_ERRORS = (TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError)
#: How many tokens a model is tried with.
_CHECKED_TOKENS = 8

_running: ContextVar[_Step | None] = ContextVar("mlx_kvcache_flat_step", default=None)


@dataclass(frozen=True)
class _Mask:
    """Stands for a causal mask, which the cache makes itself. window: 0 where none was given."""

    window: int


class _Layer:
    """One cache layer under mlx-lm's protocol, for the step that runs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.step: _Step

    @property
    def offset(self) -> mx.array:
        """The position of each token [T]; that of the next once the layer has been updated."""
        held = self.index in self.step.rows
        return self.step.positions + 1 if held else self.step.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same arrays, by which the attention call knows the layer."""
        step = self.step
        if self.index in step.rows:
            raise UnsupportedModelError(f"cache layer {self.index} is updated twice in a step")
        step.rows[self.index] = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the layer was updated with, for layers that share it."""
        return self.step.rows[self.index]

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> _Mask:
        """What the model hands on to its attention call: the window it asked for."""
        return _Mask(window_size or 0)


class _Step:
    """The arrays of one forward pass, until each layer is attended."""

    def __init__(self, cache: StepBackend) -> None:
        self.cache = cache
        self.positions = cache.step_positions()
        self.rows: dict[int, tuple[mx.array, mx.array]] = {}
        self.attended: dict[int, int] = {}
        self.windows: dict[int, int] = {}

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        for layer in reversed(self.rows):
            if self.rows[layer][0] is keys and self.rows[layer][1] is values:
                break
        else:
            raise UnsupportedModelError(
                "attention is called with other keys and values than a cache layer was updated "
                "with (as in latent attention)"
            )
        if isinstance(mask, _Mask):
            self.windows[layer] = mask.window
        elif mask is not None:
            raise UnsupportedModelError(
                f"cache layer {layer} is attended with a mask or a bias that the model made itself"
            )
        queries = queries.transpose(2, 1, 0, 3)
        calls = self.attended.get(layer, 0)
        if calls:
            answer = self.cache.attend_again(layer, queries, scale, sinks)
        else:
            rows = (keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3))
            answer = self.cache.attend(layer, queries, *rows, scale, sinks)
        self.attended[layer] = calls + 1
        return answer.transpose(2, 1, 0, 3)


class FlatModel:
    """A model that is run in flat steps on a cache of many sequences.

    Raises `UnsupportedModelError` for a model that cannot: one with recurrent layers, whose state
    has no positions; one that makes masks or attends by other means; one that takes no array of
    positions, or whose logits come out otherwise (a few tokens are tried). `GeometryError` as
    `trace_geometry`.
    """

    def __init__(self, model: Module, windows: Sequence[int] | None = None) -> None:
        self.model = model
        traced = trace_geometry(model)
        self._name = f"{type(model).__module__}.{type(model).__name__}"
        recurrent = [i for i, entry in enumerate(traced.geometry.model_layers) if entry.recurrent]
        if recurrent:
            raise UnsupportedModelError(
                f"{self._name} has recurrent state in layers {recurrent}, which cannot be shared "
                "by the sequences of a flat step; run one sequence at a time with "
                "make_prompt_cache"
            )
        self._modules = _attention_modules(model)
        self._layers = [_Layer(index) for index in range(len(traced.geometry.layers))]
        self._entries = traced.with_layers(self._layers)
        geometry, self.vocabulary = self._probed(traced)
        self.geometry = geometry
        self._check_logits()
        if windows is not None:
            self.geometry = geometry.with_windows(windows)

    def forward(self, cache: StepBackend, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Run the declared step of a cache: logits [T, vocabulary], and which rows are finite [T].

        A token with a value that is no number in any layer has one in every later layer too, so
        the values of the last one show it. Nothing is evaluated. Raises `UnsupportedModelError`,
        and what the cache raises.
        """
        step = _Step(cache)
        try:
            logits = self._run(step, tokens)
            values = step.rows[next(reversed(step.rows))][1]
        finally:
            # The layers and what was raised hold on to the step, which must not keep its rows.
            step.rows.clear()
        return logits[:, -1, :], mx.isfinite(values.astype(mx.float32).sum(axis=(1, 2, 3)))

    def _run(self, step: _Step, tokens: mx.array) -> mx.array:
        for layer in self._layers:
            layer.step = step
        _route_attention(self._modules)
        # The context ends with the call, however that ends: no interrupt leaves a step running.
        logits = copy_context().run(self._call, step, tokens)
        if len(step.attended) < len(self._layers):
            others = sorted(set(range(len(self._layers))).difference(step.attended))
            raise UnsupportedModelError(
                f"cache layers {others} were not updated, or their attention went past {ATTENTION}"
            )
        return logits

    def _call(self, step: _Step, tokens: mx.array) -> mx.array:
        _running.set(step)
        logits: mx.array = self.model(tokens[:, None], cache=self._entries)
        return logits

    def _probed(self, traced: TracedGeometry) -> tuple[CacheGeometry, int]:
        """The geometry as the attention calls show it, and the size of the vocabulary.

        Read off a lazy step over two sequences, which also shows whether the model can run one.
        The window of a layer is that of the mask it is given: some models keep flat caches and
        mask them. A layer that is attended more than once is marked `shared`.
        """
        cache = MLXCellCache(traced.geometry, CacheConfig(capacity=4, initial_capacity=4))
        try:
            cache.declare_step([(cache.new(), 2), (cache.new(), 1)])
            step = _Step(cache)
            logits = self._run(step, mx.zeros((3,), mx.int32))
        except KVCacheError as error:
            raise self._unsupported(error) from error
        except _MODEL_ERRORS as error:
            raise self._unsupported(
                f"it does something of its own with the cache's mask, rows or offset ({error})"
            ) from error
        if logits.shape[:2] != (3, 1):
            raise self._unsupported(f"its logits have the shape {list(logits.shape)}")
        layers = []
        for index, layer in enumerate(traced.geometry.layers):
            window = step.windows.get(index, 0) or layer.policy.window
            shared = layer.shared or step.attended[index] > 1
            layers.append(replace(layer, policy=LayerPolicy.from_window(window), shared=shared))
        return replace(traced.geometry, layers=tuple(layers)), logits.shape[-1]

    def _check_logits(self) -> None:
        """Hold the logits of two flat steps against those of the model on mlx-lm's own caches.

        Some models derive positions from the number of keys that a cache answers with: they run,
        and answer wrongly. Raises `UnsupportedModelError`.
        """
        count = min(_CHECKED_TOKENS, self.vocabulary)
        ids = [self.vocabulary * (2 * i + 1) // (2 * count) for i in range(count)]
        expected = self.model(mx.array([ids], mx.int32), cache=make_mlx_lm_cache(self.model))[0]
        cache = MLXCellCache(self.geometry, CacheConfig(capacity=2 * count, initial_capacity=0))
        first, second = cache.new(), cache.new()
        half = (count + 1) // 2
        rows = []
        order = []
        for begin, end in ((0, half), (half, count)):
            if begin == end:
                continue
            cache.declare_step([(second, end - begin), (first, end - begin)])
            part = ids[begin:end] * 2
            rows.append(self.forward(cache, mx.array(part, mx.int32))[0])
            order += list(range(begin, end)) * 2
        if not logits_agree(mx.concatenate(rows), expected[mx.array(order)]):
            raise self._unsupported(
                "its logits differ from those of one sequence alone, so it does not take its "
                "positions from the cache's offset alone"
            )

    def _unsupported(self, reason: object) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._name} cannot be run over unequal sequences in one step: {reason}; run one "
            "sequence at a time with make_prompt_cache"
        )


def _attention_modules(model: Module) -> tuple[ModuleType, ...]:
    """The modules of the model's parts that call `scaled_dot_product_attention`."""
    names = {type(part).__module__ for _, part in model.named_modules()}  # type: ignore[no-untyped-call]
    modules = (sys.modules.get(name) for name in sorted(names))
    return tuple(module for module in modules if module and hasattr(module, ATTENTION))


def _route_attention(modules: Sequence[ModuleType]) -> None:
    """Wrap the attention of these modules, unless it is wrapped.

    No lock and no way back: of two threads that come here at once the last one's wrapper stays, and
    either is right; taking it off could take it from a step of another thread.
    """
    for module in modules:
        attention = getattr(module, ATTENTION)
        # Whoever wraps it with `functools.wraps` copies the mark, but not the function.
        if getattr(attention, _MARK, None) is not attention:
            setattr(module, ATTENTION, _routed(attention))


def _routed(original: Any) -> Any:
    @wraps(original)
    def attention(*args: Any, **others: Any) -> Any:
        step = _running.get()
        return original(*args, **others) if step is None else _attend(step, *args, **others)

    setattr(attention, _MARK, attention)
    return attention


def _attend(
    step: _Step,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    **others: Any,
) -> mx.array:
    """`scaled_dot_product_attention` as mlx-lm's models call it, in a step."""
    del cache
    if others:
        raise UnsupportedModelError(f"attention is called with {', '.join(others)}")
    return step.attend(queries, keys, values, scale, mask, sinks)
