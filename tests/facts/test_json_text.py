"""JSON from outside is read, or a ValueError."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_kvcache.facts.json_text import read_json


@pytest.mark.parametrize("text", ["", "{", "[" * 99_999, "9" * 5000, b"\xff", '{"a": ' * 99_999])
def test_what_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_json(text)


@pytest.mark.parametrize("value", [None, 1.5, "é", [{"a": [1, 2]}]])
def test_what_can_be_read_is_what_was_written(value: Any) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value).encode()) == value


def test_hooks_are_those_of_json() -> None:
    assert read_json("[1.5, 2]", parse_float=str) == ["1.5", 2]
