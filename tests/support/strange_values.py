"""Values of every kind that no argument is made for, by name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

STRANGE: dict[str, Any] = {
    "None": None,
    "a string": "30",
    "an empty string": "",
    "a negative number": -5,
    "a bool": True,
    "a float": 1.5,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "a large number": 10**30,
    "bytes": b"ab",
    "a list": [],
    "a nested list": [[1, 2], [3]],
    "a list of None": [None],
    "a dict": {},
    "a set": {7},
    "an object": object(),
    "a numpy number": np.int64(99),
    "a numpy array": np.zeros((1, 2, 2, 4), np.float32),
    "a numpy scalar array": np.array(1.5),
    "an mlx array": mx.zeros((3,)),
    "an mlx scalar": mx.array(1.5),
    "a type": int,
    "a function": len,
}
