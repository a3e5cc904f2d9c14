"""No test of the control plane leaves a key or an active cache behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mlx_kvcache import REGISTRY, current_cache
from mlx_kvcache.errors import NoActiveCacheError


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    if REGISTRY.keys():
        # Of an engine or a conversation that another test has dropped.
        gc.collect()
    assert REGISTRY.keys() == ()
    yield
    if REGISTRY.keys():
        # A session in a cycle, such as a caught exception's traceback.
        gc.collect()
    assert REGISTRY.keys() == ()
    with pytest.raises(NoActiveCacheError):
        current_cache()
