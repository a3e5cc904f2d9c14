"""Which way a write or a gather goes: a Metal kernel, or plain MLX ops; and the form of a start.

A kernel of `mx.fast.metal_kernel` cannot write into its input: it always produces a new array, so
a write of T rows into a ring of R rows moves all R of them. MLX's own `slice_update` works in
place when nobody else holds the array, and then moves T rows. Hence the rule, in one function:
`cheaper_path`. The costs it compares count every byte read and every byte written.

A call of a kernel also keeps the host busy for ten times as long as one of MLX's ops. That goes
unseen while the GPU has more to do than the host, and counts where it has less.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import mlx.core as mx

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import CacheConfig, item_size
from mlx_kvcache.facts.geometry import CacheGeometry

KernelPath = Literal["metal", "ops"]

#: Forces one path ("metal" or "ops") for the whole process; "auto" or unset leaves the choice.
PATH_VARIABLE = "MLX_KVCACHE_KERNELS"
#: Forces the form of the start of a write ("array" or "integer").
START_FORM_VARIABLE = "MLX_KVCACHE_START"
#: What a call costs the host: of a kernel (its arguments are checked and its name is made up anew
#: each time), and of one of MLX's ops such as `slice_update`.
KERNEL_CALL_MICROSECONDS = 18.0
OP_CALL_MICROSECONDS = 1.6
#: What the slowest of Apple's GPUs moves: a kernel that repays its call there does so on any.
BYTES_PER_MICROSECOND = 100_000
#: Weights that take a GPU longer to read (a few milliseconds at 100 GB/s, half of one at 800 GB/s)
#: than the host takes to build the graph of a step (about one millisecond).
LARGE_WEIGHTS = 512 * 2**20
#: Where the weights are not known: a model that stores this much for a token is taken for a large
#: one. Many large models store less, and then get two small dispatches a layer that they could do
#: without; small ones that store more would be bound by the host. The first costs less.
LARGE_MODEL_BYTES_PER_TOKEN = 64 * 1024


@dataclass(frozen=True, order=True)
class Traffic:
    """What one path moves: bytes read plus bytes written, then GPU dispatches."""

    bytes: int
    dispatches: int


@dataclass(frozen=True)
class PathCosts:
    """The traffic of one operation on each path."""

    metal: Traffic
    ops: Traffic


def cheaper_path(costs: PathCosts) -> KernelPath:
    """The kernel where it moves fewer bytes, or as many in fewer dispatches; else MLX ops.

    A tie goes to MLX ops: they need no compilation and can work in place. So does whatever the
    ops move sooner than the host would have called the kernel.
    """
    ops = costs.ops
    longer_call = KERNEL_CALL_MICROSECONDS - ops.dispatches * OP_CALL_MICROSECONDS
    if ops.bytes < longer_call * BYTES_PER_MICROSECOND:
        return "ops"
    return "metal" if costs.metal < ops else "ops"


def ring_write_costs(
    step_rows: int, slots: int, row_bytes: int, *, runs: int, shared: bool
) -> PathCosts:
    """`step_rows` rows into a ring of `slots`, in `runs` contiguous runs (2 when it wraps).

    row_bytes: bytes of one row over all batches and heads. The kernel reads and writes the whole
    ring. The ops read and write the rows that stay (at most `slots`), one update for each run,
    and first copy the ring when somebody else holds it (`shared`).
    """
    kept = min(step_rows, slots)
    copied = slots if shared else 0
    return PathCosts(
        metal=Traffic(2 * slots * row_bytes, 1),
        ops=Traffic(2 * (kept + copied) * row_bytes, runs + (1 if shared else 0)),
    )


def ring_join_costs(old_rows: int, step_rows: int, row_bytes: int, *, runs: int) -> PathCosts:
    """`old_rows` rows out of a ring, in `runs` runs, joined with `step_rows` new ones.

    Both read and write each row once; the ops need a copy for each run and one for the new rows.
    """
    moved = 2 * (old_rows + step_rows) * row_bytes
    return PathCosts(metal=Traffic(moved, 1), ops=Traffic(moved, runs + (1 if step_rows else 0)))


def ring_write_quantized_costs(
    step_rows: int,
    slots: int,
    row_bytes: int,
    packed_bytes: int,
    *,
    runs: int,
    shared: bool,
) -> PathCosts:
    """`step_rows` rows of `row_bytes` quantized to `packed_bytes` each and written into a ring.

    The kernel reads the new rows and the packed ones that stay, and writes the packed ring. The
    ops quantize to an array of their own (`mx.quantize`), then update words, scales and biases.
    """
    kept = min(step_rows, slots)
    copied = slots if shared else 0
    metal = kept * row_bytes + (slots - kept + slots) * packed_bytes
    ops = kept * (row_bytes + packed_bytes) + 2 * (kept + copied) * packed_bytes
    return PathCosts(
        metal=Traffic(metal, 1),
        ops=Traffic(ops, 1 + 3 * (runs + (1 if shared else 0))),
    )


def cell_scatter_costs(step_rows: int, cells: int, row_bytes: int, *, shared: bool) -> PathCosts:
    """`step_rows` rows to as many of a pool's `cells`: the kernel rewrites the pool."""
    copied = cells if shared else 0
    return PathCosts(
        metal=Traffic(2 * cells * row_bytes, 1),
        ops=Traffic(2 * (step_rows + copied) * row_bytes, 1 + (1 if shared else 0)),
    )


def cell_gather_costs(gathered: int, rows: int, row_bytes: int) -> PathCosts:
    """`gathered` rows out of a pool, then rows of zeros up to `rows`.

    The ops write the gathered rows twice when others follow: into an array of their own, and from
    there into the larger one.
    """
    longer = rows > gathered
    once = (gathered + rows) * row_bytes
    return PathCosts(
        metal=Traffic(once, 1),
        ops=Traffic(once + (2 * gathered * row_bytes if longer else 0), 3 if longer else 1),
    )


@lru_cache(maxsize=1)
def forced_path() -> KernelPath | None:
    """The path that the environment forces, or None; read once a process.

    Raises `ConfigError` for a value that is none of auto, metal and ops.
    """
    value = os.environ.get(PATH_VARIABLE, "auto").strip().lower() or "auto"
    if value == "metal":
        return "metal"
    if value == "ops":
        return "ops"
    if value == "auto":
        return None
    raise ConfigError(f"{PATH_VARIABLE} must be auto, metal or ops, got {value!r}")


def prefers_array_start(geometry: CacheGeometry, config: CacheConfig) -> bool:
    """Whether decode steps should use an array start on the default device.

    An array start builds faster and lets a compiled step be reused; on a GPU it costs one small
    dispatch for each update, which an integer start does not. True on a CPU, and on a GPU for
    models so small that building the graph is what limits them: by their weights, of which a step
    reads all, where the config tells them, and else by what they store for a token.
    The environment variable MLX_KVCACHE_START=array|integer decides instead when it is set.
    """
    forced = os.environ.get(START_FORM_VARIABLE, "")
    if forced not in ("", "array", "integer"):
        raise ConfigError(f"{START_FORM_VARIABLE} must be 'array' or 'integer', got {forced!r}")
    if forced:
        return forced == "array"
    if mx.default_device().type != mx.DeviceType.gpu:
        return True
    if config.weight_bytes is not None:
        return config.weight_bytes < LARGE_WEIGHTS
    return _bytes_per_token(geometry, config) < LARGE_MODEL_BYTES_PER_TOKEN


def _bytes_per_token(geometry: CacheGeometry, config: CacheConfig) -> int:
    """Bytes stored for one token in all layers; two a number where the dtype is the model's."""
    elements = sum(layer.elements_per_position for layer in geometry.layers)
    return elements * item_size(config.kv_dtype)
