from __future__ import annotations

from pathlib import Path

import pytest

from mlx_kvcache.models.store import HOME_VARIABLE


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of this test's own."""
    home = tmp_path / "home"
    monkeypatch.setenv(HOME_VARIABLE, str(home))
    return home
