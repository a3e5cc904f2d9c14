"""Metal's library on the host: vectors, functions, lanes, limits and initial values, by numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_kvcache.store.metal import Kernel, Launch

from .host import build, executor

#: x holds 1 to 8, h the same as halves. An expression, and what it is.
NUMBERS: tuple[tuple[str, float], ...] = (
    ("float4(x[0], x[1], x[2], x[3]).zyx.x", 3),
    ("dot(v, float4(1.0f, 10.0f, 100.0f, 1000.0f))", 4321),
    ("float(dot(half2(h[0], h[1]), half2(h[2], h[3])))", 11),
    ("length(float2(3.0f, 4.0f))", 5),
    ("float4(half4(h[0], h[1], h[2], h[3])).w", 4),
    ("float(half4(v).z)", 3),
    ("float(half4(v + 0.5f).x)", 1.5),
    ("float4(v.xy, 7.0f, 8.0f).z", 7),
    ("float4(float2(1.0f, 2.0f), v.zw).w", 4),
    ("float4(9.0f, v.xyz).y", 1),
    ("float3(v.x).z", 1),
    ("(v * 2.0f + v / v - 1.0f).w", 8),
    ("(2.0f * v - -v).y", 6),
    ("v.rgba.a + v.r + v.g", 7),
    ("exp(float4(0.0f)).x + metal::exp(0.0f)", 2),
    ("fast::exp2(3.0f) + precise::sqrt(16.0f) + metal::fast::rsqrt(4.0f)", 12.5),
    ("max(v, float4(2.5f)).x + min(v, float4(2.5f)).w", 5),
    ("clamp(7, 0, 5) + abs(-3) + clamp(v, float4(2.0f), float4(3.0f)).x", 10),
    ("float(max(h[0], half(2.0f))) + float(min(ushort(3), ushort(4)))", 5),
    ("fma(2.0f, 3.0f, 4.0f) + fract(1.25f) + sign(-2.0f) + saturate(3.0f)", 10.25),
    ("mix(1.0f, 3.0f, 0.25f) + step(1.0f, 2.0f) + fmax(1.0f, NAN)", 3.5),
    ("select(v, -v, v > 2.0f).z + select(1.0f, 2.0f, true)", -1),
    ("all(v > 0.0f) && any(v > 3.0f) && !any(v > 4.0f) ? 1.0f : 0.0f", 1),
    ("(v == float4(1.0f, 0.0f, 3.0f, 0.0f)).z ? 1.0f : 0.0f", 1),
    ("float((int4(7, 8, 9, 10) % 4 & int4(1)).x + (uint2(5u, 6u) | 1u).y)", 8),
    ("float(popcount(7u) + clz(1u) + ctz(8u))", 37),
    ("as_type<float>(as_type<uint>(2.5f))", 2.5),
    ("float4(packed).y + packed[2] + (packed4 * 2.0f).x", 7),
    ("float(sizeof(packed_float3)) + float(sizeof(float3)) + float(alignof(float4))", 44),
    ("numeric_limits<float>::infinity() > 1e38 ? 1.0f : 0.0f", 1),
    ("float(numeric_limits<half>::max()) + float(numeric_limits<half>::lowest())", 0),
    ("float(numeric_limits<half>::max())", 65504),
    ("float(numeric_limits<half>::epsilon()) * 1024.0f", 1),
    ("float(numeric_limits<half>::min()) * 16384.0f", 1),
    ("float(numeric_limits<bfloat>::epsilon()) * 128.0f", 1),
    ("float(numeric_limits<bfloat>::max()) / 3.3895314e38f", 1),
    ("isinf(numeric_limits<bfloat>::infinity()) && isnan(numeric_limits<half>::quiet_NaN())", 1),
    ("float(numeric_limits<half>::digits + numeric_limits<int>::digits)", 42),
    ("written.x + written.y * 10.0f + written.z * 100.0f + written.w * 1000.0f", 3214),
    ("added.x + added[3]", 107),
    ("0.1 * 3", float(np.float32(0.1) * np.float32(3))),
)
SETUP = """
const float4 v = float4(x[0], x[1], x[2], x[3]);
const packed_float4 packed = ((const device packed_float4*)x)[0];
const float4 packed4 = packed;
float4 written;
written.zx = v.yw;
written.y = 1.0f;
written.w = 3.0f;
float4 added = v;
added += 1.0f;
added.w *= 21.0f;
"""

LANES: tuple[tuple[str, str], ...] = (
    ("simd_broadcast_first(n + 5)", "np.full(32, 5)"),
    ("int(ulong(simd_ballot(n % 3 == 0)) & 0xffff)", "np.full(32, 0b1001001001001001)"),
    ("int(simd_ballot(n >= 0).all()) + int(simd_ballot(n > 40).any())", "np.full(32, 1)"),
    ("int(simd_is_first())", "(n == 0).astype(int)"),
    ("quad_sum(n)", "n.reshape(8, 4).sum(1).repeat(4)"),
    ("quad_max(n) - quad_min(n)", "np.full(32, 3)"),
    ("quad_broadcast(n, 2)", "n // 4 * 4 + 2"),
    ("quad_shuffle(n, 3 - n % 4)", "n // 4 * 4 + 3 - n % 4"),
    ("quad_shuffle_xor(n, 1)", "n ^ 1"),
    ("quad_shuffle_down(n, 1)", "np.minimum(n + 1, n // 4 * 4 + 3)"),
    ("quad_broadcast_first(n)", "n // 4 * 4"),
    ("quad_prefix_exclusive_sum(1)", "n % 4"),
    ("int(quad_all(n < 6)) + int(quad_any(n < 6))", "(n < 4).astype(int) + (n < 8)"),
    ("simd_shuffle_rotate_down(n, 5)", "(n + 5) % 32"),
    ("simd_shuffle_rotate_up(n, 5)", "(n - 5) % 32"),
    ("int(simd_sum(half2(1.0h, 2.0h)).y)", "np.full(32, 64)"),
    ("int(tile[31 - n].z + tile[n].xy.y)", "2 * (31 - n) + n"),
    ("int((tile[n] * 2.0f).x + dot(tile[n], float4(0.0f, 0.0f, 1.0f, 0.0f)))", "2 * n + 2 * n"),
    ("int(changed[n].y)", "7 + n"),
)
LANE_SETUP = """
threadgroup float4 tile[32];
threadgroup float2 changed[32];
const int n = int(thread_index_in_simdgroup);
tile[n] = float4(float(n));
tile[n].z = float(2 * n);
changed[n] = float2(float(n), 7.0f);
changed[n].y += changed[n].x;
threadgroup_barrier(mem_flags::mem_threadgroup);
"""


def launch_of(name: str, count: int, out: mx.Dtype, threads: int, **more: object) -> Launch:
    x = mx.arange(1, 9, dtype=mx.float32)
    arrays = (x, x.astype(mx.float16))
    mx.eval(*arrays)
    grid = (threads, 1, 1)
    kernel = Kernel(f"{name}.metal", ("x", "h"), ("out",))
    shape = ((count * threads,),)
    return Launch(kernel, name, arrays, (), grid, grid, shape, (out,), **more)  # type: ignore[arg-type]


def run_body(launch: Launch, body: str, compiler: build.Compiler) -> np.ndarray:
    outputs, findings = executor.examine(launch, compiler, text=executor.Text(body), seeds=(0, 3))
    assert findings == (), "\n".join(map(str, findings))
    return np.array(outputs[0])


def test_vectors_functions_and_limits(compiler: build.Compiler) -> None:
    lines = [f"out[{i}] = {expression};" for i, (expression, _) in enumerate(NUMBERS)]
    launch = launch_of("numbers", len(NUMBERS), mx.float32, 1)
    got = run_body(launch, SETUP + "\n".join(lines), compiler)
    for (expression, wanted), number in zip(NUMBERS, got.tolist(), strict=True):
        assert number == np.float32(wanted), expression


def test_lanes_quads_and_vectors_in_threadgroup_memory(compiler: build.Compiler) -> None:
    lines = [f"out[{i * 32} + n] = {expression};" for i, (expression, _) in enumerate(LANES)]
    launch = launch_of("lanes", len(LANES), mx.int32, 32)
    got = run_body(launch, LANE_SETUP + "\n".join(lines), compiler).reshape(len(LANES), 32)
    for (expression, wanted), numbers in zip(LANES, got, strict=True):
        expected = eval(wanted, {"np": np, "n": np.arange(32)})
        assert numbers.tolist() == np.asarray(expected).tolist(), expression


def test_outputs_that_begin_with_a_value(compiler: build.Compiler) -> None:
    body = """
const uint i = thread_position_in_grid.x;
if (i % 2 == 0) {
  out[i] = out[i] + x[i / 4];
}
"""
    launch = launch_of("begun", 1, mx.float32, 32, init_value=2.5)
    got = run_body(launch, body, compiler)
    wanted = [2.5 + (1 + i // 4 if i % 2 == 0 else 0) for i in range(32)]
    assert got.tolist() == wanted
    without = launch_of("begun", 1, mx.float32, 32)
    _, findings = executor.examine(without, compiler, text=executor.Text(body))
    assert {finding.kind for finding in findings} == {"uninitialized-read", "unwritten"}
