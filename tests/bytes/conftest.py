"""Every test here runs with checked writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.checked_writes import checked_writes


@pytest.fixture(scope="module", autouse=True)
def _writes_are_checked() -> Iterator[None]:
    with checked_writes():
        yield
