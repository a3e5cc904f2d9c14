"""An independent Metal front-end reads every source as MLX hands it to the compiler.

The host executor knows only the C++ that Metal shares; a parser that somebody else wrote for
Metal itself would stumble over what is not Metal.
"""

from __future__ import annotations

import pytest
from crosstl.backend.Metal.MetalLexer import MetalLexer
from crosstl.backend.Metal.MetalParser import MetalParser

from mlx_kvcache.store import metal as metal_kernels

from .test_signature import LAUNCH_NAMES, generated, launch_named

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


def functions_of(source: str) -> list[str]:
    """The names of the functions that the front-end finds; raises what it raises."""
    shader = MetalParser(MetalLexer(PRELUDE + source).tokenize()).parse()
    return [function.name for function in shader.functions]


@pytest.mark.parametrize("name", LAUNCH_NAMES)
def test_every_source_is_metal_to_an_independent_parser(name: str) -> None:
    signature, source = generated(name)
    assert signature.function in functions_of(source)


def test_every_kernel_of_the_package_is_among_them() -> None:
    seen = {launch_named(name)[0].kernel.file for name in LAUNCH_NAMES}
    assert {kernel.file for kernel in metal_kernels.KERNELS} <= seen


@pytest.mark.parametrize(
    ("text", "slip"),
    [
        ("out + to, pack);", "out + to, pack)"),
        ("if (row >= 0) {", "if (row >= 0 {"),
        ("} else {", "else {"),
    ],
)
def test_the_parser_refuses_a_slip(text: str, slip: str) -> None:
    _, source = generated("ring_write")
    assert text in source
    with pytest.raises(Exception, match=r"(?i)expected"):
        functions_of(source.replace(text, slip))
