"""The integer side imports where MLX and NumPy are not installed."""

from __future__ import annotations

import pytest

from tests.support.processes import run_without_mlx

USE = """
from mlx_kvcache import CacheConfig, CacheGeometry, LayerGeometry, LayerPolicy, validate
from mlx_kvcache.layout import SequenceLayout
geometry = CacheGeometry((LayerGeometry(LayerPolicy.ring(4), 1, 2, 2),)).with_windows([3])
validate(geometry, CacheConfig(capacity=9))
layout = SequenceLayout([layer.policy for layer in geometry.layers], 9, 2)
layout.commit(layout.plan(0, 0, 9))
assert layout.length == 9 and layout.rewind_floor == 7
assert not FORBIDDEN & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.parametrize(
    "module",
    [
        "mlx_kvcache",
        "mlx_kvcache.layout",
        "mlx_kvcache.layout.sequence",
        "mlx_kvcache.facts.geometry",
        "mlx_kvcache.facts.config",
        "mlx_kvcache.errors",
    ],
)
def test_a_module_of_integers_needs_neither_mlx_nor_numpy(module: str) -> None:
    done = run_without_mlx(f"import {module}\nassert not FORBIDDEN & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_layouts_work_without_mlx() -> None:
    done = run_without_mlx(USE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["mlx_kvcache.cache.sequence", "mlx_kvcache.store.rows", "numpy"]
)
def test_the_hook_does_forbid(module: str) -> None:
    done = run_without_mlx(f"import {module}")
    assert done.returncode != 0
    assert "forbidden here" in done.stderr
