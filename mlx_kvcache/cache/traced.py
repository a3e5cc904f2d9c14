"""A step while `mx.compile` traces it: layers whose position is an array.

A trace is replayed for later steps, in which no Python runs. So nothing here may depend on a
position: the rows to write, the mask and the offset are arrays that the graph works out, and the
rows that are read are the same for all steps of a trace, those beyond the newest one masked.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx.core import slice_update, split

from mlx_kvcache.cache.masks import band, ring_band
from mlx_kvcache.errors import TracingError
from mlx_kvcache.store.ops import ROW_AXIS
from mlx_kvcache.store.rows import KeysValues


class PolicyForm(NamedTuple):
    """What a trace takes for granted of the layers that share a policy.

    window, ring_size: 0 for flat layers. rows: how many are read, from the first.
    heeds_model_window: whether the window that a model names narrows the layers' own.
    """

    window: int
    ring_size: int
    rows: int
    heeds_model_window: bool


class TracedSteps:
    """What the layers of one policy share in a traced step of `tokens` at `position` [1]."""

    def __init__(self, form: PolicyForm, position: mx.array, tokens: int) -> None:
        self.form = form
        self.tokens = tokens
        self.position = position[0]
        size = form.ring_size
        #: The rows to write: one start where they follow each other, else one for each.
        self.starts = [position]
        if size:
            self.starts = [(position + token) % size for token in range(tokens)]
        self._masks: dict[int, mx.array] = {}

    @property
    def is_masked(self) -> bool:
        """Whether the model has asked for a mask, which hides the rows of later steps."""
        return bool(self._masks)

    def mask(self, window: int) -> mx.array:
        """The mask bool [T, rows] of the rows answered; `window` narrows the policy's own."""
        form = self.form
        own = form.window
        if not form.heeds_model_window or not window or 0 < own < window:
            window = own
        if window not in self._masks:
            if form.ring_size:
                mask = ring_band(self.position, self.tokens, form.ring_size, window)
                self._masks[window] = mask[:, : form.rows]
            else:
                self._masks[window] = band(self.position, self.tokens, 0, form.rows, window)
        return self._masks[window]


class TracedLayer:
    """One cache layer under mlx-lm's protocol, in a step that is traced.

    Raises `TracingError` where a model asks for what only a number would answer.
    """

    def __init__(self, steps: TracedSteps, keys: mx.array, values: mx.array) -> None:
        self.keys = keys
        self.values = values
        self.offset = steps.position
        self._steps = steps
        self._answer: KeysValues | None = None

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm passes it by this name)
        return_array: bool = False,  # noqa: ARG002 (it always is one)
        window_size: int | None = None,
    ) -> mx.array:
        """The mask of the step, whose rows come as they lie in the buffer."""
        if self._steps.tokens != N:
            raise TracingError(f"a mask for {N} tokens, in a step of {self._steps.tokens}")
        return self._steps.mask(window_size or 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Write the rows of the step; answer the first rows of the buffer, for its mask."""
        steps = self._steps
        if self._answer is not None or keys.shape[2] != steps.tokens:
            raise TracingError("a layer is updated in several parts")
        if not steps.is_masked:
            raise TracingError("a layer is updated and no mask was asked for")
        if not values.shape[3]:
            raise TracingError("a layer without values ranks the rows, which it counts")
        self.keys = _written(self.keys, keys, steps.starts)
        self.values = _written(self.values, values, steps.starts)
        self.offset = steps.position + steps.tokens
        rows = steps.form.rows
        self._answer = (
            _first(self.keys, rows).astype(keys.dtype),
            _first(self.values, rows).astype(values.dtype),
        )
        return self._answer

    def keys_and_values(self) -> KeysValues:
        """What the update has answered with, for layers that share this one."""
        if self._answer is None:
            raise TracingError("a layer is read before it was updated")
        return self._answer

    @property
    def is_written(self) -> bool:
        """Whether the model has updated this layer."""
        return self._answer is not None

    @property
    def start_position(self) -> mx.array:
        """Position of the first row of the window of the next token."""
        return mx.maximum(0, self.offset - self._steps.form.window + 1)

    def maybe_trim_front(self) -> None:
        """As `MLXLMLayer`'s."""


def _written(buffer: mx.array, rows: mx.array, starts: list[mx.array]) -> mx.array:
    if len(starts) == 1:
        return slice_update(buffer, rows, starts[0], ROW_AXIS)
    for token, start in enumerate(starts):
        buffer = slice_update(buffer, rows[:, :, token : token + 1], start, ROW_AXIS)
    return buffer


def _first(buffer: mx.array, rows: int) -> mx.array:
    return buffer if rows == buffer.shape[2] else split(buffer, (rows,), 2)[0]
