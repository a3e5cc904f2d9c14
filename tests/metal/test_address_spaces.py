"""A compiler that has address spaces checks the kernels' pointers.

On the host the spaces are tags on a class. clang's C++ for OpenCL has them in the language, with
the rules that Metal has too: no conversion between global (device), constant and local
(threadgroup) pointers, overloads by space, copies of structs out of and into each. Each source is
compiled to the point of code generation, as the functions that MLX generates around them.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from mlx_kvcache.store.metal import SHARED_HEADER, read_source

from .host.signature import signature_of
from .test_signature import LAUNCH_NAMES, launch_named

KERNELS = [name for name in LAUNCH_NAMES if name != "all_attributes"]

#: What the kernels use of Metal's library, declared for OpenCL. bfloat stands in as a half.
PRELUDE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned int uint, uint32_t;
typedef unsigned short ushort;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef long int64_t;
typedef half float16_t, bfloat16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
#define device __global
#define constant __constant
#define threadgroup __local
#define INFINITY __builtin_inff()
float min(float, float);
float max(float, float);
float abs(float);
float rint(float);
float round(float);
int clamp(int, int, int);
float simd_shuffle_xor(float, ushort);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
#define memory_order_relaxed 0
#define atomic_int metal_atomic_int
struct metal_atomic_int { int value; };
#define atomic_store_explicit metal_atomic_store
#define atomic_load_explicit metal_atomic_load
#define atomic_fetch_max_explicit metal_atomic_fetch_max
void metal_atomic_store(__local metal_atomic_int*, int, int);
int metal_atomic_load(__local metal_atomic_int*, int);
int metal_atomic_fetch_max(__local metal_atomic_int*, int, int);
"""
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]")
#: OpenCL allows local arrays only in functions that are no templates; a pointer has the same type.
_SHARED = re.compile(r"\bthreadgroup (\w+) (\w+)\[\w+\];")


def opencl_unit(name: str, body: str | None = None) -> str:
    """A kernel as a function of C++ for OpenCL, and a call that instantiates it."""
    launch, own = launch_named(name)
    text = own if body is None else body
    signature = signature_of(launch, own)
    parameters = ", ".join(parameter.text for parameter in signature.parameters)
    arguments = ", ".join(parameter.name for parameter in signature.parameters)
    function = _ATTRIBUTE.sub("", signature.text) + _SHARED.sub(
        r"threadgroup \1* \2 = (threadgroup \1*)0;", text
    )
    call = f"{signature.function}{signature.template_arguments}({arguments});"
    header = read_source(SHARED_HEADER)
    return f"{PRELUDE}{header}{function}\n}}\nvoid call({parameters}) {{ {call} }}\n"


def complaints(source: str) -> str:
    """What clang says against a unit; empty when it accepts it."""
    clang = shutil.which("clang")
    if clang is None:
        pytest.skip("clang is not installed")
    done = subprocess.run(
        [clang, "-x", "cl", "-cl-std=clc++", "-target", "spir64", "-fsyntax-only", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unknown target triple" in done.stderr or "No available targets" in done.stderr:
        pytest.skip("this clang has no OpenCL target")
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("name", KERNELS)
def test_the_address_spaces_of_each_kernel_fit(name: str) -> None:
    assert complaints(opencl_unit(name)) == ""


@pytest.mark.parametrize(
    ("slip", "complaint"),
    [
        ("const device T* start = (const device T*)ring_shape;", "address space"),
        ("threadgroup float* tile = out;", "cannot initialize"),
        ("device int* shape = ring_shape;", "cannot initialize"),
        ("rows[0] = ring[0];", "not assignable"),
    ],
)
def test_a_mixed_up_space_is_refused(slip: str, complaint: str) -> None:
    _, body = launch_named("ring_write")
    assert complaint in complaints(opencl_unit("ring_write", f"{body}\n{slip}"))
