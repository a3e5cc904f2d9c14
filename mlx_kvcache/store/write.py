"""Writing rows into a pool: one function for both forms of the start.

MLX writes into the pool's own buffer when nobody else holds the array, whatever the pool's size.
An array start builds faster and lets a compiled step be reused; on a GPU it costs one small
dispatch for each update, which an integer start does not.
"""

from __future__ import annotations

import os

import mlx.core as mx

from mlx_kvcache.errors import ConfigError

#: Rows lie on axis 2 of [B, H, rows, D].
ROW_AXIS = (2,)

START_FORM_VARIABLE = "MLX_KVCACHE_START"
#: From this many stored bytes a token on, a model is bound by its GPU and not by graph building.
LARGE_MODEL_BYTES_PER_TOKEN = 64 * 1024


def write_rows(pool: mx.array, rows: mx.array, start: int | mx.array) -> mx.array:
    """`pool` [B, H, N, D] with `rows` [B, H, T, D] at row `start`, cast to the pool's dtype.

    The caller guarantees that the rows fit: MLX does not check an array start.
    """
    if isinstance(start, mx.array):
        return mx.slice_update(pool, rows, start, ROW_AXIS)
    # A new handle to the same buffer: item assignment rebinds the handle it is called on, and
    # whoever was given the old one must not see it change.
    written = pool[:]
    written[:, :, start : start + rows.shape[2]] = rows
    return written


def prefers_array_start(bytes_per_token: int) -> bool:
    """Whether decode steps should use an array start on the default device.

    True on a CPU, and on a GPU for models so small that building the graph is what limits them.
    The environment variable MLX_KVCACHE_START=array|integer decides instead when it is set.
    """
    forced = os.environ.get(START_FORM_VARIABLE, "")
    if forced not in ("", "array", "integer"):
        raise ConfigError(f"{START_FORM_VARIABLE} must be 'array' or 'integer', got {forced!r}")
    if forced:
        return forced == "array"
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return not on_gpu or bytes_per_token < LARGE_MODEL_BYTES_PER_TOKEN
