"""step_calls.py counts what it says, and the counts stay where they are meant to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from step_calls import CASES, PACKAGE, app, calls_of, count

from mlx_kvcache import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.integrations.attention import ATTENTION
from tests.support.command_lines import run_app

#: The most files and calls of a step over two layers.
LIMITS = {
    "drop-in, a decode step": (4, 16),
    "drop-in, a decode step of a wrapped ring": (4, 14),
    "drop-in, the first write": (11, 150),
    "drop-in, a write that wraps a ring": (11, 250),
    "engine, a decode step (cell)": (10, 95),
    "engine, a decode step (batched)": (13, 135),
}


@pytest.fixture(autouse=True)
def _unrouted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes off what an engine of another test has wrapped for good."""
    monkeypatch.setattr(llama, ATTENTION, scaled_dot_product_attention)


def test_a_call_is_counted_where_its_code_lies() -> None:
    def two_policies() -> None:
        LayerPolicy.from_window(3)
        LayerPolicy.from_window(0)

    calls = calls_of(two_policies)
    assert {file.split("/")[0] for file in calls} == {"facts"}
    assert all((PACKAGE / file).is_file() for file in calls)
    assert calls.total() > calls_of(lambda: LayerPolicy.from_window(3)).total() > 0
    assert not calls_of(lambda: len([CacheGeometry, LayerGeometry]))


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_takes_few_files_and_calls(name: str) -> None:
    counted = count(name)
    files, calls = LIMITS[name]
    assert len(counted.calls) <= files, counted.calls
    assert counted.calls.total() <= calls, counted.calls


@pytest.mark.parametrize("kind", ["cell", "batched"])
def test_the_engine_adds_four_files_and_few_calls(kind: str) -> None:
    counted = count(f"engine, a decode step ({kind})")
    attention = "integrations/attention.py"
    own = {file for file in counted.calls if file.startswith("engine/") or file == attention}
    assert own == {"engine/engine.py", "engine/exclusive.py", "engine/passes.py", attention}
    assert sum(counted.calls[file] for file in own) <= 25, counted.calls


def test_the_script_writes_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    code, shown = run_app(app, "--json", str(file), "--markdown")
    assert code == 0, shown
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    assert set(results) == set(CASES)
    for name, result in results.items():
        assert name in shown
        assert result["files"] == len(result["by_file"])
        assert result["calls"] == sum(result["by_file"].values()) > 0
