"""Metal text to C++ text: what changes, and that nothing else does."""

from __future__ import annotations

import pytest

from mlx_kvcache.store import metal

from .host.translate import NAMESPACE, threads_meet, to_cpp


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
            'host::Shared<__LINE__, __COUNTER__, float, (N * 2)> tile("tile");',
        ),
        (
            "threadgroup half t[4][N];",
            'host::Shared<__LINE__, __COUNTER__, half, (4), (N)> t("t");',
        ),
        (
            "threadgroup atomic_int count;",
            'host::Shared<__LINE__, __COUNTER__, atomic_int> count("count");',
        ),
        ("threadgroup float* p = tile;", "host::pointer<host::threadgroup_space, float> p = tile;"),
        ("const constant int32_t& start", "const constant int32_t& start"),
        ("thread float* p = local;", "thread float* p = local;"),
        ("int product = device_rows * 2;", "int product = device_rows * 2;"),
        (
            "x * 0.5 + 1e-3 - 2.f + .25 + 3. + 4.0h;",
            "x * 0.5f + 1e-3f - 2.f + .25f + 3.f + half(4.0f);",
        ),
        ("a1.5; v.x1; 0x1p-3; 7; 0x1e3;", "a1.5; v.x1; 0x1p-3f; 7; 0x1e3;"),
        ("v.xz = u.rgba;", "v.template swizzle<0, 2>() = u.template swizzle<0, 1, 2, 3>();"),
        ("v.zyx.x", "v.template picked<2, 1, 0>().x"),
        ("v.x = u.xy(1);", "v.x = u.xy(1);"),
        ("float x;", "float x; host::garble(x);"),
        ("T a[N], b = f(1, 2), c;", "T a[N], b = f(1, 2), c; host::garble(a); host::garble(c);"),
        ("Pack<T, N> p;", "Pack<T, N> p; host::garble(p);"),
        ("for (int i; i < n;) return x;", "for (int i; i < n;) return x;"),
        ("struct P { float x; T lane[N]; };", "struct P { float x; T lane[N]; };"),
        ("{ half h; }", "{ half h; host::garble(h); }"),
        ("const float x = 1; x = y;", "const float x = 1; x = y;"),
    ],
)
def test_what_changes_and_what_does_not(metal_text: str, wanted: str) -> None:
    assert to_cpp(metal_text) == wanted


def test_a_declaration_outside_of_functions_is_no_local() -> None:
    assert to_cpp("extern int x;\nvoid f() { int y; }", NAMESPACE) == (
        "extern int x;\nvoid f() { int y; host::garble(y); }"
    )


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
