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
_MAY_QUOTE = re.compile(r"\[\[.*?\]\]|\bstatic_assert\s*\([^;\"]*,\s*\"[^\"\n]*\"\s*\)", re.DOTALL)
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


_DEFINITION = re.compile(r"\b(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{")
_CALL = re.compile(rf"\b(\w+)\s*(?:{_ARGUMENTS}\s*)?\(")
_NO_FUNCTION = {"if", "for", "while", "switch", "catch"}


@dataclass(frozen=True)
class Refusal:
    """A line of a kernel that Metal would refuse, and why."""

    line: int
    reason: str


def may_recurse(source: str) -> bool:
    """Whether some function may call itself, as far as names tell: overloads count as one."""
    text = without_comments(source)
    calls: dict[str, set[str]] = {}
    for found in _DEFINITION.finditer(text):
        if found[1] not in _NO_FUNCTION:
            body = text[found.end() : _end_of_block(text, found.end())]
            calls.setdefault(found[1], set()).update(_CALL.findall(body))
    for start in calls:
        seen: set[str] = set()
        ahead = set(calls[start])
        while ahead:
            name = ahead.pop()
            if name == start:
                return True
            if name in calls and name not in seen:
                seen.add(name)
                ahead |= calls[name]
    return False


def _end_of_block(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at
    return len(text)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found.group())


def type_names(text: str) -> frozenset[str]:
    """The types that a text declares, and its template's."""
    return frozenset(name for pair in _NEW_TYPE.findall(text) for name in pair if name)


def _pointers(types: frozenset[str]) -> re.Pattern[str]:
    """Pointer and reference types: a product has no type before it."""
    known = "|".join([_BUILT_IN, *(rf"{name}(?:\s*{_ARGUMENTS})?" for name in sorted(types))])
    return re.compile(
        rf"(?<![\w.>:])(?P<before>(?:(?:const|volatile|{_SPACES}|typename|metal\s*::)\s+)*)"
        rf"\b(?:{known})(?P<after>(?:\s+(?:const|volatile|{_SPACES}))*)\s*(?P<mark>[*&])(?!&)"
    )


def _names_a_space(found: re.Match[str]) -> bool:
    return re.search(rf"\b(?:{_SPACES})\b", found["before"] + found["after"]) is not None


def refusals(
    source: str, *, in_function: bool, types: frozenset[str] = frozenset()
) -> list[Refusal]:
    """What is not Metal in a text; `in_function` says whether it is the body of one.

    types: the names of types that it knows from elsewhere.
    """
    text = without_comments(source)
    found: list[tuple[int, str]] = []
    text = _PREPROCESSOR.sub(_blank, text)
    quotable = _MAY_QUOTE.sub(_blank, text)
    found += [(each.start(), "a string literal") for each in _QUOTED.finditer(quotable)]
    text = _QUOTED.sub(_blank, text)
    for each in _ABSENT_WORD.finditer(text):
        found.append((each.start(), f"Metal has no {each.group().strip()}"))
    for each in _pointers(types | type_names(text)).finditer(text):
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
    lines = {Refusal(text.count("\n", 0, at) + 1, reason) for at, reason in found}
    return sorted(lines, key=lambda refusal: (refusal.line, refusal.reason))
