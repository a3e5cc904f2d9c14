"""Checks that every room makes of the values it is given, each said once."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(
    value: object, minimum: int | None = None, maximum: int | None = None
) -> TypeGuard[int]:
    """Whether a value is an int within the bounds, both included; a bool is none.

    Python counts True as 1, while JSON and whoever passes a flag by mistake tell them apart.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def whole_number(text: str) -> int | None:
    """The number >= 0 that decimal digits stand for; None for other text, or too many of them."""
    try:
        return int(text) if text.isdecimal() else None
    except ValueError:
        return None


def shortened(value: object) -> str:
    """The repr of a value for a message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no integer of thousands of digits.
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
