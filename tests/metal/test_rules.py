"""What Metal's language does not have is refused, by its line; what only looks like it is not."""

from __future__ import annotations

import pytest

from mlx_kvcache.store import metal

from .host.rules import may_recurse, refusals, type_names


def reasons(text: str, *, in_function: bool = True) -> list[str]:
    return [refusal.reason for refusal in refusals(text, in_function=in_function)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("float* p = q;", "a pointer without an address space"),
        ("const float *p = q;", "a pointer without an address space"),
        ("auto* p = out;", "a pointer without an address space"),
        ("x = (half4*)y;", "a pointer without an address space"),
        ("vec<half, 4>* p;", "a pointer without an address space"),
        ("void f(uint8_t* p);", "a pointer without an address space"),
        ("const float& same = x;", "a reference without an address space"),
        ("struct P {}; P* p;", "a pointer without an address space"),
        ("using U = float; U* p;", "a pointer without an address space"),
        ("typedef float U; U* p;", "a pointer without an address space"),
        ("atomic<int>* p;", "a pointer without an address space"),
        ("double x = 1;", "Metal has no double"),
        ("long long x = 1;", "Metal has no long long"),
        ("x = std::max(a, b);", "Metal has no std::"),
        ("p = new float[4];", "Metal has no new"),
        ("throw 1;", "Metal has no throw"),
        ("static int n = 0;", "a static variable"),
        ("static float table[4];", "a static variable"),
        ('f("text");', "a string literal"),
        ('static_assert(sizeof("text") == 5, "fits");', "a string literal"),
    ],
)
def test_a_refusal(text: str, reason: str) -> None:
    assert reasons(text) == [reason]


@pytest.mark.parametrize(
    "text",
    [
        "device float* p = out; const device float* q = x; device const float* r = x;",
        "thread float* p = lanes; threadgroup half4* t = tile; constant int& n = count;",
        "const thread Pack<float, 2>& pack = other;",
        "float y = a * b; int z = n & 3; bool c = (a > b) & (c < d);",
        "float product = x*y; product = float(a) * b; n = sizeof(float) * 4;",
        "doubled = newest * renewed; constant_rows = stdlib;",
        'static_assert(N > 1, "at least two"); static constexpr int N = 4;',
        "static constant float table[2] = {1.0f, 2.0f}; x = static_cast<float>(y);",
        '// double, static, new, "text", float* p\n/* goto */ x = 1;',
        '[[host_name("f")]] [[kernel]] void f();',
        '#include "other.h"\n#pragma once',
        "struct P { static int next(int n) { return n; } };",
        "if (a && b) { x = y; }",
    ],
)
def test_no_refusal(text: str) -> None:
    assert reasons(text) == []


def test_a_static_function_stands_in_a_header_and_a_static_variable_does_not() -> None:
    assert reasons("static inline int f(int n) { return n; }", in_function=False) == []
    assert reasons("static int n;\nint f() { return n; }", in_function=False) != []
    assert reasons("int f() { static int n(0); return n; }", in_function=False) != []


def test_a_refusal_names_its_line() -> None:
    assert refusals("x = 1;\n/* a\nb */\ndouble y;", in_function=True)[0].line == 4


def test_types_are_known_from_elsewhere() -> None:
    text = "Pack<float, 2>* p = q;\nT* r = s;"
    assert reasons(text) == []
    known = type_names("template <typename T, int N>\nstruct Pack { T lane[N]; };")
    assert known == {"T", "Pack"}
    assert len(refusals(text, in_function=True, types=known)) == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("int f(int n) { return n ? f(n - 1) : 0; }", True),
        (
            "int g(int n) { return h(n); }\nint h(int n) { if (n) { return g(n - 1); } return 0; }",
            True,
        ),
        ("template <int N> int f() { return f<N - 1>(); }", True),
        ("int f(int n) { return n; }\nint g(int n) { return f(f(n)); }", False),
        ("int f(int n) { return n; } // f(1)\nx = f(2);", False),
        ("if (a) { b(c); } for (;;) { if (d) { } }", False),
    ],
)
def test_whether_a_function_may_call_itself(text: str, wanted: bool) -> None:
    assert may_recurse(text) is wanted


def test_the_shipped_kernels_are_metal() -> None:
    assert refusals(metal.read_source(metal.SHARED_HEADER), in_function=False) == []
    assert not may_recurse(metal.read_source(metal.SHARED_HEADER))
    for kernel in metal.KERNELS:
        assert not may_recurse(metal.read_source(kernel.file))
        assert refusals(metal.read_source(kernel.file), in_function=True) == []
