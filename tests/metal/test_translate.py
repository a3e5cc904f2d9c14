"""Metal text to C++ text: what changes, and that nothing else does."""

from __future__ import annotations

import pytest

from mlx_kvcache.store import metal

from .host.translate import threads_meet, to_cpp


@pytest.mark.parametrize(
    ("metal_text", "wanted"),
    [
        ("const device float* x = y;", "host::pointer<host::device_space, const float> x = y;"),
        ("device const T *x;", "host::pointer<host::device_space, const T>x;"),
        ("(device vec<T, 4>*)out", "(host::pointer<host::device_space, vec<T, 4>>)out"),
        (
            "const constant int64_t* s [[buffer(1)]],",
            "host::pointer<host::constant_space, const int64_t> s ,",
        ),
        (
            "threadgroup float tile[N * 2];",
            'host::Shared<float, (N * 2)> tile(HOST_STATEMENT_KEY, "tile");',
        ),
        (
            "threadgroup half t[4][N];",
            'host::Shared<half, (4), (N)> t(HOST_STATEMENT_KEY, "t");',
        ),
        (
            "threadgroup atomic_int count;",
            'host::Shared<atomic_int> count(HOST_STATEMENT_KEY, "count");',
        ),
        ("threadgroup float* p = tile;", "host::pointer<host::threadgroup_space, float> p = tile;"),
        ("const constant int32_t& start", "const constant int32_t& start"),
        ("thread float* p = local;", "thread float* p = local;"),
        ("int product = device_rows * 2;", "int product = device_rows * 2;"),
    ],
)
def test_only_declarations_change(metal_text: str, wanted: str) -> None:
    assert to_cpp(metal_text) == wanted


def test_lines_stay_where_they_are() -> None:
    for kernel in metal.KERNELS:
        source = metal.read_source(kernel.file)
        translated = to_cpp(source)
        assert translated.count("\n") == source.count("\n")
    assert to_cpp("a; /* one\ntwo */ b;") == "a;       \n       b;"


def test_a_mention_in_a_comment_is_no_meeting() -> None:
    assert threads_meet("x = simd_sum(x);")
    assert threads_meet("threadgroup_barrier(mem_flags::mem_none);")
    assert not threads_meet("// simd_sum(x) would do\nx = 1;")
    assert [k.file for k in metal.KERNELS if threads_meet(metal.read_source(k.file))] == [
        "ring_write_quantized.metal",
        "cell_scatter.metal",
    ]
