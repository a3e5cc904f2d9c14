"""What Metal refuses and a C++ compiler does not, told from the text of a kernel.

Metal is C++ without some of its parts, and every pointer says where it points to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .translate import FUNCTION, NAMESPACE, TYPE, scopes_of, without_comments

#: Words of C++ that Metal's language does not have.
_ABSENT = (
    "asm", "catch", "delete", "double", "dynamic_cast", "goto", "new", "noexcept", "register",
    "thread_local", "throw", "try", "typeid", "virtual", "wchar_t",
)  # fmt: skip
_ABSENT_WORD = re.compile(rf"\b(?:{'|'.join(_ABSENT)}|long\s+long)\b|\bstd\s*::")
_PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_MAY_QUOTE = re.compile(r"\[\[.*?\]\]|\bstatic_assert\s*\((?:[^;]*?),\s*\"[^\"\n]*\"\s*\)", re.DOTALL)
_STATIC = re.compile(r"\bstatic\b(?P<rest>[^;={(]*)(?P<end>[;={(])")
_SPACES = r"device|constant|threadgroup|thread"
_ARGUMENTS = r"<[^;(){}<>]*(?:<[^;(){}<>]*>[^;(){}<>]*)*>"
_BUILT_IN = (
    r"(?:packed_)?(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]?"
    r"|u?int(?:8|16|32|64)_t|b?float16_t|float32_t|size_t|ptrdiff_t|auto|void"
    rf"|atomic_(?:u?int|float|bool|ulong)|atomic\s*{_ARGUMENTS}|(?:packed_)?vec\s*{_ARGUMENTS}"
)
_NEW_TYPE = re.compile(
    r"\b(?:struct|class|enum(?:\s+class)?|union|typename|using)\s+(\w+)"
    r"|\btypedef\b[^;]*?\b(\w+)\s*;"
)


@dataclass(frozen=True)
class Refusal:
    """A line of a kernel that Metal would refuse, and why."""

    line: int
    reason: str


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found.group())


def _pointers(text: str) -> re.Pattern[str]:
    """Pointer and reference types of the types that a text knows: a product has no type before it."""
    own = {name for pair in _NEW_TYPE.findall(text) for name in pair if name}
    known = "|".join([_BUILT_IN, *(rf"{name}(?:\s*{_ARGUMENTS})?" for name in sorted(own))])
    return re.compile(
        rf"(?<![\w.>:])(?P<before>(?:(?:const|volatile|{_SPACES}|typename|metal\s*::)\s+)*)"
        rf"\b(?:{known})(?P<after>(?:\s+(?:const|volatile|{_SPACES}))*)\s*(?P<mark>[*&])(?!&)"
    )


def _names_a_space(found: re.Match[str]) -> bool:
    return re.search(rf"\b(?:{_SPACES})\b", found["before"] + found["after"]) is not None


def refusals(source: str, *, in_function: bool) -> list[Refusal]:
    """What is not Metal in a text; `in_function` says whether it is the body of one."""
    text = without_comments(source)
    found: list[tuple[int, str]] = []
    text = _PREPROCESSOR.sub(_blank, text)
    quotable = _MAY_QUOTE.sub(_blank, text)
    found += [(each.start(), "a string literal") for each in _QUOTED.finditer(quotable)]
    text = _QUOTED.sub(_blank, text)
    for each in _ABSENT_WORD.finditer(text):
        found.append((each.start(), f"Metal has no {each.group().strip()}"))
    for each in _pointers(text).finditer(text):
        if not _names_a_space(each):
            kind = "pointer" if each["mark"] == "*" else "reference"
            found.append((each.start("mark"), f"a {kind} without an address space"))
    scopes = scopes_of(text, FUNCTION if in_function else NAMESPACE)
    for each in _STATIC.finditer(text):
        fixed = re.search(r"\b(?:constant|constexpr)\b", each["rest"])
        scope = scopes[each.start()]
        method = each["end"] == "(" and scope in (TYPE, NAMESPACE)
        if not fixed and not method:
            found.append((each.start(), "a static variable"))
    return sorted(
        (Refusal(text.count("\n", 0, at) + 1, reason) for at, reason in found),
        key=lambda refusal: refusal.line,
    )
