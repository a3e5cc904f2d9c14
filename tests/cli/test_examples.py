"""The examples in help texts and docs: they run, and those about windows reach a wrap."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.commands.figures import ring_facts, rings_text
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from tests.support.tiny_models_on_disk import words

DOCS = Path(__file__).parents[2] / "docs"


def examples(text: str) -> list[list[str]]:
    """The arguments of every line that begins with `mlx-kvcache`, up to a pipe or a comment."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("mlx-kvcache ")]
    return [shlex.split(re.split(r" [|<#]", line)[0])[1:] for line in lines]


def of_help(command: str) -> list[list[str]]:
    function = getattr(import_module(f"mlx_kvcache.commands.{command}"), command)
    return examples(function.__doc__)


def of_docs() -> list[list[str]]:
    return [each for file in sorted(DOCS.glob("*.md")) for each in examples(file.read_text())]


def about_windows(command: str) -> list[list[str]]:
    found = [each for each in (*of_help(command), *of_docs()) if each[0] == command]
    return [each for each in found if "--windows" in each]


@pytest.mark.parametrize("arguments", about_windows("op"), ids=" ".join)
def test_op_examples_wrap(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    if "--json" not in arguments:
        assert re.search(r"; ring \d+ wrapped (once|\d+ times)$", result.stdout.strip())
    facts = json.loads(run(*arguments, "--json").stdout)
    assert max(each["wraps"] for each in facts["results"]) >= 1


@pytest.mark.parametrize("arguments", about_windows("generate"), ids=" ".join)
def test_generate_examples_wrap(run, llama, arguments):
    """On another model, with a prompt of one token: the answer alone must be long enough."""
    # Everything that is about its own model comes before the windows.
    choices = arguments[arguments.index("--windows") :]
    assert not {"-m", "--model", "--raw"} & set(choices)
    result = run("generate", words(5), "--model", llama, *choices)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"; ring\(\d+\) wrapped (once|\d+ times)$", result.stderr.splitlines()[0])


def test_there_are_such_examples():
    assert len(about_windows("op")) >= 2
    assert len(about_windows("generate")) >= 1


@pytest.mark.parametrize("arguments", of_help("op"), ids=" ".join)
def test_every_op_example_runs(run, arguments):
    assert run(*arguments).exit_code == 0


def test_wraps_are_counted_by_the_rows_that_come_round(run):
    """Window 8 with 4 spare rows are 11 slots: position 11 is the first in a slot that was used."""
    base = ("op", "--kv-cache", "64,1,1,8", "--windows", "8", "--spare", "4", "--json")
    for steps, wraps in (("11", [0]), ("11,1", [0, 1]), ("22", [1]), ("20,3,11", [1, 2, 3])):
        facts = json.loads(run(*base, "--steps", steps).stdout)
        assert [each["wraps"] for each in facts["results"]] == wraps
    flat = json.loads(run("op", "--kv-cache", "64,1,1,8", "--steps", "40", "--json").stdout)
    assert [each["wraps"] for each in flat["results"]] == [0]


def test_a_cache_of_several_windows_tells_each():
    layers = [LayerGeometry(LayerPolicy.ring(window), 1, 8, 8) for window in (16, 4, 4)]
    flat = LayerGeometry(LayerPolicy.flat(), 1, 8, 8)
    cache = MLXSequenceCache(CacheGeometry((*layers, flat)), CacheConfig(64, spare=2))
    assert rings_text(cache.layout) == "ring(4) has not wrapped, ring(16) has not wrapped"
    cache.layout.restore(12, 18)
    assert rings_text(cache.layout) == "ring(4) wrapped 3 times, ring(16) wrapped once"
    assert ring_facts(cache.layout)[0] == {"window": 4, "layers": 2, "slots": 5, "wraps": 3}
