"""The README's blocks on the real demo models: its demonstration shows what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_kvcache.control.factory import FACTORY
from mlx_kvcache.models import resolve
from tests.support.document_blocks import ROOT, Block, blocks_of

pytestmark = pytest.mark.models

BLOCKS = [block for block in blocks_of(ROOT / "README.md") if block.language == "python"]


def test_the_demonstration_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [each for each in BLOCKS if "speculative_generate_step" in each.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in said if line[1:3] == ["as", "greedy:"]] == ["True", "False"]
    # The windows wrapped, and our rings too, whose spare rows come on top.
    model, prompt, greedy = names["model"], names["prompt"], names["greedy"]
    cache = names["make_prompt_cache"](model)
    ring = max(layer.policy.window for layer in cache.sequence.geometry.layers)
    assert len(prompt) < ring
    assert len(prompt) + len(greedy) > ring + cache.sequence.config.spare - 1
    assert len(set(greedy)) > 10
    # Another prompt has other tokens: what is compared is not always the same.
    names["prompt"] = mx.concatenate([prompt[:-1], prompt[:1]])
    assert names["drafted"](names["make_prompt_cache"]) != greedy


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if "speculative_generate_step" not in each.text], ids=str
)
def test_the_other_blocks_run(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FACTORY, "_builders", dict(FACTORY._builders))
    config = json.loads((resolve("smollm2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    if "print(" in block.text:
        assert len(capsys.readouterr().out) > 20
