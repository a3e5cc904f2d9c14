"""chart.py draws what was measured: each figure of the results stands in the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from chart import main

pytestmark = pytest.mark.slow

SPREADS = {
    "mlx_kvcache": {"median": 3.26, "lower": 3.0, "upper": 3.5},
    "mlx-lm": {"median": 8.94, "lower": 8.5, "upper": 9.5},
}
MACHINE = {
    "metal": False,
    "cpu": "a processor",
    "cores": 2,
    "load": 0.25,
    "mlx": "1",
    "mlx_lm": "2",
}


def results(name: str = "cache_steps", **kinds: Any) -> dict[str, Any]:
    phase = {"name": "flat", "host_us_per_layer": SPREADS, "host_ratio": {"median": 0.365}}
    return {"benchmark": name, "machine": MACHINE, "results": kinds or {"flat": [phase]}}


def drawn(tmp_path: Path, content: dict[str, Any]) -> str:
    written, picture = tmp_path / "steps.json", tmp_path / "chart.svg"
    written.write_text(json.dumps(content))
    main(written, picture)
    return picture.read_text()


def test_each_figure_stands_in_the_picture(tmp_path: Path) -> None:
    picture = drawn(tmp_path, results())
    for text in (
        "3.3",
        "8.9",
        "0.36 of mlx-lm",
        "CPU figures, not Metal: a processor",
        "load 0.25",
    ):
        assert text in picture
    assert drawn(tmp_path, results()) == picture


@pytest.mark.parametrize("content", [results("sessions"), results(growth=[])])
def test_other_results_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(typer.BadParameter):
        drawn(tmp_path, content)
    assert not (tmp_path / "chart.svg").exists()
