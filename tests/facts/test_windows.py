"""Other windows than the published ones, without altering what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache import read_metadata, write_metadata
from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import CacheGeometry
from tests.support.described_geometry import GEOMETRY, geometries, metadata, read


@given(geometries(), st.data())
def test_other_windows_never_alter_the_original(
    geometry: CacheGeometry, data: st.DataObject
) -> None:
    count = len(geometry.layers)
    windows = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    twin = read(geometry.to_metadata())
    before, number = geometry.to_metadata(), hash(geometry)
    changed = geometry.with_windows(windows)
    assert changed is not geometry
    assert list(changed.windows) == windows
    assert geometry == twin
    assert (geometry.to_metadata(), hash(geometry)) == (before, number)
    expected = {**before, "windows": windows}
    assert changed.to_metadata() == expected
    assert changed.with_windows(before["windows"]) == geometry
    assert (changed == geometry) == (windows == before["windows"])


@pytest.mark.parametrize("windows", [[], [1, 2], [1, 2, 3, 4], [-1], [0, 512, -128], [1.0], ["7"]])
def test_refused_windows_alter_nothing_either(windows: Any) -> None:
    with pytest.raises(GeometryError):
        GEOMETRY.with_windows(windows)
    assert GEOMETRY.to_metadata() == metadata()


def test_an_override_is_not_published_unless_it_is_written(tmp_path: Path) -> None:
    write_metadata(GEOMETRY, tmp_path)
    published = read_metadata(tmp_path)
    run = published.with_windows([16])
    assert (run.windows, published.windows) == ((0, 16, 16), (0, 512, 128))
    assert read_metadata(tmp_path) == published == GEOMETRY
