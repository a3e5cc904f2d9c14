"""The benchmarks are scripts in their own directory, which they import from."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def benchmarks() -> Path:
    return BENCHMARKS
