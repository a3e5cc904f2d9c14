"""Metal source to C++ for the host: line for line, so that a finding names the kernel's own line.

What changes: a pointer with an address space becomes a checked pointer of that space (mixing
spaces stays an error, as in Metal), a threadgroup array becomes the group's shared one, a local
without a value is filled with garbage, a number such as 0.5 is a float, `v.xz` becomes a call, and
attributes in double brackets go. Everything else is compiled as it stands.
"""

from __future__ import annotations

import re

from .signature import Parameter, Signature

_TYPE = r"[A-Za-z_][\w:]*(?:<[^;(){}]*?>)?"
_POINTER = re.compile(
    rf"(?P<const1>\bconst\s+)?\b(?P<space>device|constant|threadgroup)\s+(?P<const2>const\s+)?"
    rf"(?P<type>{_TYPE})(?P<const3>\s+const)?\s*\*"
)
_SHARED = re.compile(
    rf"\bthreadgroup\s+(?P<type>{_TYPE})\s+(?P<name>\w+)\s*(?P<sizes>(?:\[[^\]]+\]\s*)*);"
)
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_MEETING = re.compile(r"\b(?:threadgroup_barrier|simdgroup_barrier|simd_\w+|quad_\w+)\s*\(")


_SWIZZLE = re.compile(r"\.\s*(?P<lanes>[xyzw]{2,4}|[rgba]{2,4})\b(?!\s*[(<])")
#: A floating-point number that says no type.
_NUMBER = re.compile(
    r"(?<![\w.])(?P<digits>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+"
    r"|0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][+-]?\d+)(?![\w.])"
)
_HALF_NUMBER = re.compile(r"(?<![\w.])(?P<digits>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?)[hH]\b")
#: A statement that declares locals: no other one begins with two words.
_DECLARATION = re.compile(
    rf"^\s*(?:(?:thread|volatile|typename)\s+)*(?P<type>{_TYPE})\s+(?P<names>\w+\s*(?:[\[,=].*)?)$",
    re.DOTALL,
)
_NO_TYPE = frozenset(
    {"break", "case", "const", "constant", "constexpr", "continue", "default", "delete", "device",
     "do", "else", "enum", "goto", "new", "return", "static", "struct", "class", "threadgroup",
     "typedef", "union", "using", "namespace", "template"}
)  # fmt: skip
#: What a pair of braces, or the whole text, holds.
NAMESPACE, TYPE, FUNCTION = "namespace", "type", "function"
_OPENS_TYPE = re.compile(r"\b(?:struct|class|union|enum)\b[^;(){}]*$")
_OPENS_NAMESPACE = re.compile(r"\bnamespace\b[^;(){}]*$")


def scopes_of(text: str, outermost: str) -> list[str]:
    """For each character of a text without comments, what the braces around it hold."""
    stack, scopes, start = [outermost], [], 0
    for at, character in enumerate(text):
        if character == "{":
            opening = text[start:at]
            if _OPENS_NAMESPACE.search(opening):
                stack.append(NAMESPACE)
            else:
                stack.append(TYPE if _OPENS_TYPE.search(opening) else FUNCTION)
        scopes.append(stack[-1])
        if character == "}" and len(stack) > 1:
            stack.pop()
        if character in "{};":
            start = at + 1
    return scopes


def without_comments(source: str) -> str:
    """The source with comments blanked out, of as many lines as before."""
    return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), source)


def threads_meet(source: str) -> bool:
    """Whether the kernel has barriers or simdgroup functions, so that its threads need fibers."""
    return _MEETING.search(without_comments(source)) is not None


def _checked_pointer(found: re.Match[str]) -> str:
    const = any(found[group] for group in ("const1", "const2", "const3"))
    element = f"const {found['type']}" if const else found["type"]
    return f"host::pointer<host::{found['space']}_space, {element}>"


def _shared_array(found: re.Match[str]) -> str:
    sizes = re.findall(r"\[([^\]]+)\]", found["sizes"])
    arguments = ", ".join([found["type"], *(f"({size})" for size in sizes)])
    name = found["name"]
    return f'host::Shared<__LINE__, __COUNTER__, {arguments}> {name}("{name}");'


def _swizzled(found: re.Match[str]) -> str:
    lanes = ", ".join(
        str("xyzw".find(c) if c in "xyzw" else "rgba".find(c)) for c in found["lanes"]
    )
    # What is asked for a component of its own is only read.
    is_read = re.match(r"\s*\.", found.string[found.end() :])
    return f".template {'picked' if is_read else 'swizzle'}<{lanes}>()"


def _without_value(statement: str) -> list[str]:
    """The locals that a statement declares and gives no value."""
    found = _DECLARATION.match(statement)
    if found is None or found["type"] in _NO_TYPE:
        return []
    parts, depth, start = [], 0, 0
    for at, character in enumerate(found["names"] + ","):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append(found["names"][start:at])
            start = at + 1
    names = (re.match(r"\s*(\w+)", part) for part in parts if "=" not in part and "(" not in part)
    return [name[1] for name in names if name]


def _with_garbage(text: str, outermost: str) -> str:
    """The text with every local that is declared without a value filled with garbage."""
    scopes = scopes_of(text, outermost)
    pieces, start, depth = [], 0, 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth or character not in "{};":
            continue
        pieces.append(text[start : at + 1])
        if character == ";" and scopes[at] == FUNCTION:
            pieces += [f" host::garble({name});" for name in _without_value(text[start:at])]
        start = at + 1
    return "".join(pieces) + text[start:]


def to_cpp(source: str, outermost: str = FUNCTION) -> str:
    """Metal text as C++ text, of the same number of lines; `outermost` is where it stands."""
    text = without_comments(source)
    text = _ATTRIBUTE.sub("", text)
    text = _NUMBER.sub(r"\g<digits>f", text)
    text = _HALF_NUMBER.sub(r"half(\g<digits>f)", text)
    text = _SWIZZLE.sub(_swizzled, text)
    previous = None
    while previous != text:  # a pointer type may stand within a pointer type's arguments
        previous = text
        text = _POINTER.sub(_checked_pointer, text)
    text = _SHARED.sub(_shared_array, text)
    text = _with_garbage(text, outermost)
    assert text.count("\n") == source.count("\n")
    return text


def _argument(parameter: Parameter) -> str:
    number, space = parameter.number, f"host::{parameter.space}_space"
    return {
        "input": f"host::input<{space}, {parameter.type_name}>({number})",
        "scalar": f"host::scalar<{parameter.type_name}>({number})",
        "shape": f"host::shape({number})",
        "strides": f"host::strides({number})",
        "ndim": f"host::ndim({number})",
        "output": f"host::output<{parameter.type_name}>({number})",
        "attribute": f"host::attribute::{parameter.name}()",
    }[parameter.kind]


def unit(signature: Signature, header: tuple[str, str], body: tuple[str, str]) -> str:
    """The whole C++ unit: header and body are pairs of file name and Metal text."""
    inputs = [p for p in signature.parameters if p.kind in ("input", "scalar")]
    outputs = [p for p in signature.parameters if p.kind == "output"]
    names = ["{" + ", ".join(f'"{p.name}"' for p in group) + "}" for group in (inputs, outputs)]
    arguments = ",\n      ".join(_argument(p) for p in signature.parameters)
    fibers = "true" if threads_meet(header[1] + body[1]) else "false"
    return "\n".join(
        [
            '#include "arguments.h"',
            f'const char* host::kernel_file() {{ return "{body[0]}"; }}',
            "#define device",
            "#define constant",
            "#define threadgroup",
            "#define thread",
            "namespace metal {",
            f'#line 1 "{header[0]}"',
            to_cpp(header[1], NAMESPACE),
            '#line 1 "signature"',
            to_cpp(signature.text, NAMESPACE).rstrip("\n"),
            f'#line 1 "{body[0]}"',
            to_cpp(body[1]),
            "}",
            "#undef device",
            "#undef constant",
            "#undef threadgroup",
            "#undef thread",
            '#line 1 "launch"',
            "static void run_thread() {",
            f"  {signature.function}{signature.template_arguments}(",
            f"      {arguments});",
            "}",
            "} // namespace metal",
            "int main(int, char** arguments) {",
            f"  static const char* const inputs[] = {names[0]};",
            f"  static const char* const outputs[] = {names[1]};",
            f"  return host::run(arguments[1], {{inputs, {len(inputs)}, outputs, {len(outputs)},",
            f'      {fibers}, {{"{body[0]}", 1}}, metal::run_thread}});',
            "}",
            "",
        ]
    )
