"""The Metal kernels of this package: their sources, and how each of them is launched.

A `Launch` is everything that one dispatch needs, as a value: `run` hands it to
`mx.fast.metal_kernel`. Sources are read from the installed package, or from the `metal` folder of
a checkout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from mlx_kvcache.errors import KernelUnavailableError

Shape = tuple[int, ...]
Size = tuple[int, int, int]
TemplateValue = mx.Dtype | int | bool

#: Bytes that one thread moves where the head dim allows: the widest load of the GPU.
PACK_BYTES = 16
#: Threads of a threadgroup: eight simdgroups.
GROUP_THREADS = 256
#: MLX passes an input with fewer elements in constant memory.
TINY_ELEMENTS = 8
SHARED_HEADER = "row_pack.h"


@dataclass(frozen=True)
class Kernel:
    """One file of the `metal` folder, and the names that its body uses for its arrays."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


RING_WRITE = Kernel("ring_write.metal", ("ring", "rows", "start_slot"), ("out",))
RING_JOIN = Kernel("ring_join.metal", ("ring", "rows", "first_slot"), ("out",))
RING_WRITE_QUANTIZED = Kernel(
    "ring_write_quantized.metal",
    ("words", "scales", "biases", "rows", "start_slot"),
    ("words_out", "scales_out", "biases_out"),
)
CELL_SCATTER = Kernel("cell_scatter.metal", ("pool", "rows", "cells"), ("out",))
CELL_GATHER = Kernel("cell_gather.metal", ("pool", "cells"), ("out",))
KERNELS = (RING_WRITE, RING_JOIN, RING_WRITE_QUANTIZED, CELL_SCATTER, CELL_GATHER)


@dataclass(frozen=True)
class Launch:
    """One dispatch of a kernel: the arguments of `mx.fast.metal_kernel` and of its call.

    `name` carries the dtype and the shape class, so that no two sources share a compiled kernel.
    init_value: what the outputs hold before the kernel runs; None where it writes all of them.
    """

    kernel: Kernel
    name: str
    arrays: tuple[mx.array, ...]
    template: tuple[tuple[str, TemplateValue], ...]
    grid: Size
    threadgroup: Size
    output_shapes: tuple[Shape, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    init_value: float | None = None


@cache
def read_source(file: str) -> str:
    """The text of one file of the `metal` folder.

    Raises `KernelUnavailableError` when neither the package nor the checkout holds it.
    """
    installed = files("mlx_kvcache") / "metal" / file
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    checkout = Path(__file__).resolve().parents[2] / "metal" / file
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    raise KernelUnavailableError(
        f"the Metal source {file} is neither in the installed package nor at {checkout}; "
        "reinstall mlx-kvcache, or set MLX_KVCACHE_KERNELS=ops"
    )


@cache
def _compiled(kernel: Kernel, name: str) -> object:
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=read_source(kernel.file),
        header=read_source(SHARED_HEADER),
        # The kernels follow the strides of their inputs: a transposed key costs no copy.
        ensure_row_contiguous=False,
    )


def run(launch: Launch, *, verbose: bool = False) -> tuple[mx.array, ...]:
    """The outputs of one dispatch, lazily, on the current GPU stream.

    `verbose` prints the source that MLX generates. Raises what MLX raises where there is no Metal.
    """
    compiled = _compiled(launch.kernel, launch.name)
    outputs: list[mx.array] = compiled(  # type: ignore[operator]
        inputs=list(launch.arrays),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=list(launch.output_shapes),
        output_dtypes=list(launch.output_dtypes),
        init_value=launch.init_value,
        verbose=verbose,
    )
    return tuple(outputs)


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _pack(dtype: mx.Dtype, dim: int) -> int:
    widest = PACK_BYTES // dtype.size
    return widest if dim % widest == 0 else 1


def _group(grid: Size) -> Size:
    """Up to GROUP_THREADS threads: along x first, then y; never more than the grid has."""
    x = min(grid[0], GROUP_THREADS)
    return x, max(1, min(grid[1], GROUP_THREADS // x)), 1


def _scalar(value: int | mx.array) -> mx.array:
    if isinstance(value, mx.array):
        return value.reshape(()).astype(mx.int32)
    return mx.array(value, mx.int32)


def _tiny(arrays: tuple[mx.array, ...]) -> str:
    """Which inputs MLX passes in constant memory, as part of a kernel's name: another source."""
    tiny = [str(i) for i, array in enumerate(arrays) if array.ndim and array.size < TINY_ELEMENTS]
    return f"_tiny{''.join(tiny)}" if tiny else ""


def _move(kernel: Kernel, dtype: mx.Dtype, arrays: tuple[mx.array, ...], shape: Shape) -> Launch:
    """A launch that fills `[B, H, rows, D]` with moved packs of elements."""
    batch, heads, rows, dim = shape
    pack = _pack(dtype, dim)
    grid = (dim // pack, rows, batch * heads)
    return Launch(
        kernel=kernel,
        name=f"kv_{Path(kernel.file).stem}_{_dtype_name(dtype)}_pack{pack}{_tiny(arrays)}",
        arrays=arrays,
        template=(("T", dtype), ("PACK", pack)),
        grid=grid,
        threadgroup=_group(grid),
        output_shapes=(shape,),
        output_dtypes=(dtype,),
    )


def ring_write(ring: mx.array, rows: mx.array, start_slot: int | mx.array) -> Launch:
    """`rows` [B, H, T, D], T >= 1, into `ring` [B, H, R, D] from slot `start_slot` on, wrapping."""
    return _move(RING_WRITE, ring.dtype, (ring, rows, _scalar(start_slot)), ring.shape)


def ring_join(ring: mx.array, rows: mx.array, first_slot: int | mx.array, old_count: int) -> Launch:
    """`old_count` rows of `ring` from slot `first_slot` on, wrapping, then `rows` (T >= 1)."""
    batch, heads, _, dim = ring.shape
    shape = (batch, heads, old_count + rows.shape[2], dim)
    return _move(RING_JOIN, ring.dtype, (ring, rows, _scalar(first_slot)), shape)


def cell_scatter(pool: mx.array, rows: mx.array, cells: mx.array) -> Launch:
    """`rows` [B, H, T, D], T >= 1, to `cells` [T] of `pool` [B, H, C, D]."""
    return _move(CELL_SCATTER, pool.dtype, (pool, rows, cells.astype(mx.int32)), pool.shape)


def cell_gather(pool: mx.array, cells: mx.array, rows: int = 0) -> Launch:
    """The rows of `cells` [S], S >= 1, out of `pool` [B, H, C, D]; rows of zeros up to `rows`."""
    batch, heads, _, dim = pool.shape
    shape = (batch, heads, max(cells.size, rows), dim)
    return _move(CELL_GATHER, pool.dtype, (pool, cells.astype(mx.int32)), shape)


def ring_write_quantized(
    words: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    start_slot: int | mx.array,
    *,
    cpu_rule: bool = False,
) -> Launch:
    """`rows` [B, H, T, D], T >= 1, quantized into a ring of R slots, wrapping.

    words [B, H, R, D * bits / 32], scales and biases [B, H, R, D / group]. `cpu_rule` rounds as
    `mx.quantize` does on the CPU; the default is its rule on the GPU.
    """
    batch, heads, slots, words_per_row = words.shape
    dim = rows.shape[3]
    group_size = dim // scales.shape[3]
    bits = words_per_row * 32 // dim
    grid = (words_per_row, slots, batch * heads)
    rule = "cpu" if cpu_rule else "gpu"
    arrays = (words, scales, biases, rows, _scalar(start_slot))
    shape_class = f"{_dtype_name(rows.dtype)}_g{group_size}_b{bits}_{rule}{_tiny(arrays)}"
    return Launch(
        kernel=RING_WRITE_QUANTIZED,
        name=f"kv_ring_write_quantized_{shape_class}",
        arrays=arrays,
        template=(
            ("T", rows.dtype),
            ("GROUP", group_size),
            ("BITS", bits),
            ("CPU_RULE", cpu_rule),
        ),
        grid=grid,
        threadgroup=_group(grid),
        output_shapes=(words.shape, scales.shape, biases.shape),
        output_dtypes=(words.dtype, scales.dtype, biases.dtype),
    )
