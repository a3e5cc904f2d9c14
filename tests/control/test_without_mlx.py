"""Registry, sessions, faces and metadata work where neither MLX nor NumPy is installed."""

from __future__ import annotations

from tests.support.processes import run_without_mlx

USE = """
import tempfile
from tests.support.plain_cache import CONFIG, GEOMETRY, PlainCache
from mlx_kvcache import (
    FACTORY, REGISTRY, CacheGeometry, CacheSession, SequencePlanner, current_cache,
    read_metadata, write_metadata,
)
from mlx_kvcache.layout import SequenceLayout

FACTORY.register("plain", "sequence", PlainCache)
with CacheSession(GEOMETRY, CONFIG, backend="plain") as session:
    assert REGISTRY.get(session.key) is current_cache()
    assert type(session.cache) is PlainCache
with tempfile.TemporaryDirectory() as directory:
    write_metadata(GEOMETRY, directory)
    assert read_metadata(directory) == GEOMETRY
assert CacheGeometry.from_metadata(GEOMETRY.to_metadata()) == GEOMETRY
layout = SequenceLayout([layer.policy for layer in GEOMETRY.layers], 8, 2)
assert isinstance(layout, SequencePlanner)
assert not FORBIDDEN & {name.split(".")[0] for name in sys.modules}
"""

BUILD = """
from tests.support.plain_cache import CONFIG, GEOMETRY
from mlx_kvcache import CacheSession
CacheSession(GEOMETRY, CONFIG).open()
"""


def test_the_control_plane_works_without_mlx() -> None:
    done = run_without_mlx(USE)
    assert done.returncode == 0, done.stderr


def test_the_hook_does_forbid() -> None:
    done = run_without_mlx(BUILD)
    assert done.returncode != 0
    assert "forbidden here: mlx" in done.stderr
