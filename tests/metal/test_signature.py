"""The generated source around each kernel is the one that the installed MLX generates.

MLX prints it when a kernel is called with `verbose`. Without Metal a kernel can still be traced
for export, which generates the source as well.
"""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlx_kvcache.store import metal
from mlx_kvcache.store.metal import Kernel, Launch, read_source
from tests.support.processes import run_python

from .host.signature import ATTRIBUTES, Signature, signature_of

LAUNCH_NAMES = (
    "ring_write",
    "ring_write_small",
    "ring_join",
    "ring_write_quantized",
    "cell_scatter",
    "cell_gather",
    "all_attributes",
)
ALL_ATTRIBUTES = " + ".join(
    f"{name}.x" if type_name == "uint3" else name for name, type_name in ATTRIBUTES
)


def launch_named(name: str) -> tuple[Launch, str]:
    """A launch of each kernel, of one with tiny inputs, and of one that uses everything."""
    ring, rows = mx.zeros((1, 2, 8, 16), mx.bfloat16), mx.zeros((1, 2, 3, 16), mx.bfloat16)
    cells = mx.array([1, 2, 3])
    if name == "ring_write":
        launch = metal.ring_write(ring, rows, 3)
    elif name == "ring_write_small":
        launch = metal.ring_write(mx.zeros((1, 1, 3, 2)), mx.zeros((1, 1, 3, 2)), 1)
    elif name == "ring_join":
        launch = metal.ring_join(ring.astype(mx.float16), rows.astype(mx.float16), 3, 4)
    elif name == "ring_write_quantized":
        pool = mx.quantize(mx.zeros((1, 2, 8, 64)), group_size=32, bits=8)
        launch = metal.ring_write_quantized(*pool, mx.zeros((1, 2, 3, 64)), 3)
    elif name == "cell_scatter":
        launch = metal.cell_scatter(ring, rows, cells)
    elif name == "cell_gather":
        launch = metal.cell_gather(ring, cells)
    else:
        kernel = Kernel("all_attributes", ("x", "y"), ("out", "other"))
        arrays = (mx.zeros((3, 4)), mx.array(2, mx.uint8))
        shapes, dtypes = ((12,), (3,)), (mx.uint32, mx.float16)
        launch = Launch(kernel, name, arrays, (), (12, 1, 1), (12, 1, 1), shapes, dtypes)
        return launch, f"out[x_ndim + x_shape[0] + x_strides[1] + y] = {ALL_ATTRIBUTES};"
    return launch, read_source(launch.kernel.file)


def generated(name: str) -> tuple[Signature, str]:
    """Our signature, and all of the source as we would hand it over."""
    launch, body = launch_named(name)
    signature = signature_of(launch, body)
    return signature, signature.whole(read_source(metal.SHARED_HEADER), body)


def trace_with_mlx(name: str) -> None:
    """Makes MLX print the source that it generates; run in a process of its own."""
    launch, body = launch_named(name)
    kernel = mx.fast.metal_kernel(
        name=launch.name,
        input_names=list(launch.kernel.inputs),
        output_names=list(launch.kernel.outputs),
        source=body,
        header=read_source(metal.SHARED_HEADER),
        ensure_row_contiguous=False,
    )

    def call(*arrays: mx.array) -> list[mx.array]:
        return kernel(  # type: ignore[no-any-return, operator]
            inputs=list(arrays),
            template=list(launch.template),
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=list(launch.output_shapes),
            output_dtypes=list(launch.output_dtypes),
            verbose=True,
        )

    if mx.metal.is_available():
        call(*launch.arrays)
    else:
        mx.export_function("/dev/null", call, *launch.arrays)


def test_the_generated_source_is_mlx_s_own() -> None:
    code = "import sys; from tests.metal.test_signature import trace_with_mlx\n"
    code += "for name in sys.argv[1:]: trace_with_mlx(name)"
    done = run_python(code, *LAUNCH_NAMES)
    printed = re.findall(r"Generated source code for `\w+`:\n```\n(.*?)\n```\n", done.stdout, re.S)
    assert len(printed) == len(LAUNCH_NAMES), done.stderr[-2000:]
    for name, source in zip(LAUNCH_NAMES, printed, strict=True):
        assert source.strip() == generated(name)[1].strip(), name


def test_no_two_shape_classes_share_a_function_name() -> None:
    names = {
        signature_of(launch, read_source(launch.kernel.file)).function
        for launch in (
            metal.ring_write(mx.zeros((1, 1, 8, dim), dtype), mx.zeros((1, 1, 8, dim), dtype), 0)
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
            for dim in (16, 17)
        )
    }
    assert len(names) == 6


@pytest.mark.parametrize("mention", ["rows_shape", "rows_strides", "threads_per_grid"])
def test_only_what_the_body_mentions_is_passed(mention: str) -> None:
    launch, body = launch_named("ring_join")
    assert mention in signature_of(launch, body).text
    assert mention not in signature_of(launch, body.replace(mention, "gone")).text
