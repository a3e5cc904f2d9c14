"""The text that MLX generates around a kernel's body, and its parameters as data.

Follows `write_signature` and `metal_kernel` of mlx/backend/common/metal_kernel.cpp, MLX 0.32.4:
an input is `constant` when it has fewer than 8 elements, a reference when it has no axes; its
shape, strides and number of axes, and the thread attributes, are there when the body mentions
them. `test_signature.py` compares the text with what the installed MLX prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_kvcache.store.metal import TINY_ELEMENTS, Launch

ParameterKind = Literal["input", "scalar", "shape", "strides", "ndim", "output", "attribute"]

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

ATTRIBUTES = (
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function: `number` counts inputs or outputs."""

    kind: ParameterKind
    name: str
    type_name: str
    space: str
    number: int

    @property
    def text(self) -> str:
        """The declaration, without the buffer index or the attribute that follows it."""
        space, kind = self.space, self.kind
        if kind == "attribute":
            return f"{self.type_name} {self.name}"
        if kind == "output":
            return f"device {self.type_name}* {self.name}"
        mark = "&" if kind in ("scalar", "ndim") else "*"
        return f"const {space} {self.type_name}{mark} {self.name}"


@dataclass(frozen=True)
class Signature:
    """The generated function: its name, template and parameters."""

    function: str
    template_declaration: str
    template_arguments: str
    parameters: tuple[Parameter, ...]

    @property
    def text(self) -> str:
        """What stands between the header and the body, as MLX writes it."""
        lines = [f"[[kernel]] void {self.function}("]
        buffers = [p for p in self.parameters if p.kind != "attribute"]
        attributes = [p for p in self.parameters if p.kind == "attribute"]
        declared = [f"  {p.text} [[buffer({i})]]" for i, p in enumerate(buffers)]
        declared += [f"  {p.text} [[{p.name}]]" for p in attributes]
        lines += [line + "," for line in declared[:-1]] + [declared[-1] + ") {"]
        return self.template_declaration + "\n".join(lines) + "\n"

    def whole(self, header: str, body: str) -> str:
        """All the source that MLX hands to the Metal compiler, short of its own library."""
        text = f"{header}{self.text}{body}\n}}\n"
        if self.template_arguments:
            instance = f"{self.function}{self.template_arguments}"
            text += f'\ntemplate [[host_name("{self.function}")]] [[kernel]] '
            text += f"decltype({instance}) {instance};\n"
        return text


def _template(launch: Launch) -> tuple[str, str]:
    if not launch.template:
        return "", ""
    declared, given = [], []
    for name, value in launch.template:
        if isinstance(value, bool):
            declared.append(f"bool {name}")
            given.append(str(int(value)))
        elif isinstance(value, int):
            declared.append(f"int {name}")
            given.append(str(value))
        else:
            declared.append(f"typename {name}")
            given.append(TYPE_NAMES[value])
    return f"template <{', '.join(declared)}>\n", f"<{', '.join(given)}>"


def _function_name(launch: Launch, arguments: str) -> str:
    name = f"custom_kernel_{launch.name}"
    if arguments:
        name += "_" + re.sub("<|>|(, )", "_", arguments)[:-1]
    for array in launch.arrays:
        name += f"_{TYPE_NAMES[array.dtype]}"
        if array.ndim == 0:
            name += "s"
        elif array.size < TINY_ELEMENTS:
            name += "c"
    for dtype in launch.output_dtypes:
        name += f"_{TYPE_NAMES[dtype]}"
    return name


def _input_parameters(name: str, array: mx.array, number: int, body: str) -> list[Parameter]:
    space = "constant" if array.size < TINY_ELEMENTS else "device"
    kind: ParameterKind = "input" if array.ndim else "scalar"
    found = [Parameter(kind, name, TYPE_NAMES[array.dtype], space, number)]
    if array.ndim:
        extras: tuple[tuple[ParameterKind, str], ...] = (
            ("shape", "int"),
            ("strides", "int64_t"),
            ("ndim", "int"),
        )
        for extra, type_name in extras:
            if f"{name}_{extra}" in body:
                found.append(Parameter(extra, f"{name}_{extra}", type_name, "constant", number))
    return found


def signature_of(launch: Launch, body: str) -> Signature:
    """The signature that MLX generates for this launch of a kernel with this body."""
    declaration, arguments = _template(launch)
    parameters: list[Parameter] = []
    for number, (name, array) in enumerate(zip(launch.kernel.inputs, launch.arrays, strict=True)):
        parameters += _input_parameters(name, array, number, body)
    outputs = zip(launch.kernel.outputs, launch.output_dtypes, strict=True)
    for number, (name, dtype) in enumerate(outputs):
        parameters.append(Parameter("output", name, TYPE_NAMES[dtype], "device", number))
    for name, type_name in ATTRIBUTES:
        if name in body:
            parameters.append(Parameter("attribute", name, type_name, "", 0))
    return Signature(_function_name(launch, arguments), declaration, arguments, tuple(parameters))
