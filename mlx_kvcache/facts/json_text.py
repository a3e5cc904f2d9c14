"""JSON from outside."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes, **hooks: Any) -> Any:
    """What a JSON text holds. hooks: those of `json.loads`.

    Raises `ValueError`, also for what Python cannot take: deep nesting, or too many digits.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
