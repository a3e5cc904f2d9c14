"""What counts as an integer, and how values are shown in messages."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.checks import is_integer, shortened
from mlx_kvcache.facts.config import ITEM_SIZES, KV_DTYPES, item_size


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], np.int32(1), float("nan")])
def test_only_ints_are_integers_and_no_bools(value: object) -> None:
    assert not is_integer(value)
    assert not is_integer(value, 0, 9)
    assert is_integer(1)


def test_bounds_are_included() -> None:
    assert [value for value in range(-3, 6) if is_integer(value, -1, 3)] == [-1, 0, 1, 2, 3]
    assert is_integer(2**80, 0)
    assert is_integer(-(2**80), maximum=0)
    assert not is_integer(0, 1)
    assert not is_integer(2, maximum=1)
    assert is_integer(0, 0, 0)


def test_long_values_are_cut_and_short_ones_are_not() -> None:
    assert shortened([1, "a"]) == "[1, 'a']"
    assert shortened("x" * 78) == repr("x" * 78)
    cut = shortened("x" * 79)
    assert (len(cut), cut[-4:]) == (80, "x...")


def test_item_sizes_are_those_of_the_arrays() -> None:
    import mlx.core as mx

    assert set(KV_DTYPES) == set(ITEM_SIZES) == {"float32", "float16", "bfloat16"}
    for name in KV_DTYPES:
        assert item_size(name) == mx.zeros(1, getattr(mx, name)).itemsize
    assert item_size(None) == 2
    for wrong in ("int8", "fp16", 4, ["float32"]):
        with pytest.raises(ConfigError, match="kv_dtype must be one of"):
            item_size(wrong)  # type: ignore[arg-type]
