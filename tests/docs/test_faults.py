"""The table of faults names tests that exist, and at least one for each fault."""

from __future__ import annotations

import re

import pytest

from tests.support.document_blocks import ROOT

TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
#: Rows of the tables, less their headings and the lines below those.
ROWS = [
    line
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| What ", "|---"))
]


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", source, re.MULTILINE)


def test_every_fault_has_a_test() -> None:
    assert len(ROWS) > 40
    without = [row for row in ROWS if "`tests/" not in row]
    assert without == []


def test_every_name_in_the_table_is_looked_for() -> None:
    assert sum(row.count("`tests/") for row in ROWS) == TEXT.count("`tests/")
    assert {f"{path}::{name}" for path, name in NAMED} == set(re.findall(r"`(tests/[^`]+)`", TEXT))
