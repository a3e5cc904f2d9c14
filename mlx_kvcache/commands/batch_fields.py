"""The fields of one line of `batch`: the options that may vary by line, under all their names."""

from __future__ import annotations

import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Any, TypeVar

from mlx_kvcache.commands.options import RunOptions
from mlx_kvcache.errors import ConfigError

#: What all lines have in common: the model, its cache, and what the command shows.
WHOLE_RUN = frozenset(
    {
        "model", "adapter_path", "dtype", "extra_eos_token",
        "capacity", "kv_dtype", "spare", "windows",
    }
)  # fmt: skip
#: Names that others use for our options.
ALIASES = {
    "temperature": "temp",
    "max_completion_tokens": "max_tokens",
    "system_prompt": "system",
    "chat_template_kwargs": "chat_template_args",
}

_Options = TypeVar("_Options", bound=RunOptions)
_SAID = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    types.NoneType: "null",
}
_UNFIT = object()


@functools.cache
def line_options() -> Mapping[str, Any]:
    """The type of each option that may vary by line."""
    hints = typing.get_type_hints(RunOptions)
    return {one.name: hints[one.name] for one in fields(RunOptions) if one.name not in WHOLE_RUN}


def with_fields(options: _Options, given: Mapping[str, object]) -> _Options:
    """The options with those of a line in their place.

    given: by the names of `option_names`. Raises `ConfigError` for a value of another type, an
    option given under two names, or one of the whole run that is not as it is there.
    """
    changes: dict[str, Any] = {}
    for field, value in given.items():
        name = ALIASES.get(field, field)
        if name in WHOLE_RUN:
            if value != getattr(options, name):
                raise ConfigError(
                    f"{field!r} is {value!r}, but is {getattr(options, name)!r} for the whole run; "
                    f"leave it out of the line, or change --{name.replace('_', '-')}"
                )
            continue
        if name in changes:
            raise ConfigError(f"{name!r} is given twice, also as {field!r}; give it once")
        if name == "chat_template_args" and isinstance(value, dict):
            value = json.dumps(value)
        changes[name] = _converted(field, value, line_options()[name])
    return replace(options, **changes)


def option_names() -> tuple[str, ...]:
    """All names under which a line may have an option, those of the whole run included."""
    return (*line_options(), *ALIASES, *sorted(WHOLE_RUN))


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for the first name that is none of those known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"unknown field {name!r}; {hint}")


def check_text(text: str, name: str) -> None:
    """Raise `ConfigError`, under `name`, for text that has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} holds half of a surrogate pair; repair the escape") from error


def _converted(field: str, value: object, hint: Any) -> Any:
    kinds = _alternatives(hint)
    for kind in kinds:
        found = _as_kind(value, kind)
        if found is not _UNFIT:
            for text in found if isinstance(found, list | tuple) else (found,):
                if isinstance(text, str):
                    check_text(text, repr(field))
            return found
    raise ConfigError(f"{field!r} must be {' or '.join(map(_said, kinds))}, got {value!r}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _as_kind(value: object, kind: Any) -> Any:
    """The JSON value as a value of a type; `_UNFIT` if it is none."""
    origin = typing.get_origin(kind)
    if origin in (list, tuple, Sequence):
        # One value stands for a list of one, as in OpenAI's "stop".
        values = value if isinstance(value, list) else [value]
        found = [_as_kind(each, typing.get_args(kind)[0]) for each in values]
        return _UNFIT if _UNFIT in found else (tuple if origin is tuple else list)(found)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((member for member in kind if member.value == value), _UNFIT)
    if isinstance(value, bool) and kind is not bool:
        return _UNFIT
    if kind is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return _UNFIT
    return value if isinstance(value, origin or kind) else _UNFIT


def _said(kind: Any) -> str:
    if typing.get_origin(kind) in (list, tuple, Sequence):
        return f"a list, each {_said(typing.get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    return _SAID.get(kind, str(kind))
