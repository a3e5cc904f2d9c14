"""Hypothesis profiles: `ci` repeats the same examples each run, `explore` looks for new ones.

Choose with the environment variable HYPOTHESIS_PROFILE.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "explore", settings.get_profile("ci"), derandomize=False, max_examples=1500
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def collected() -> None:
    """Collect what earlier tests left: freed during a measure, it hides what is made."""
    gc.collect()
