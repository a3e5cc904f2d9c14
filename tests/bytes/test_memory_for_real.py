"""Under a limit on the address space: what cannot be had is refused, and what is named can be had.

Without the refusal, MLX ends these processes by a signal.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import COMMAND, ROOT
from tests.support.tiny_models_on_disk import words, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="macOS does not hold RLIMIT_AS"),
]
LIMIT = 1600 * 2**20
#: Positions of which none of the layouts below could have the rows: 16 KiB each.
FAR = 1_000_000

CODE = """
import json, sys
import mlx.core as mx
from mlx_kvcache import *
from mlx_kvcache.errors import MemoryLimitError

FAR = int(sys.argv[2])

def geometry(window):
    policy = LayerPolicy.from_window(window)
    return CacheGeometry((LayerGeometry(policy, kv_heads=4, key_dim=128, value_dim=128),) * 4)

def rows(tokens):
    return mx.broadcast_to(mx.ones((1, 1, 1, 1)), (1, 4, tokens, 128))

def step(cache, tokens):
    if not isinstance(cache, MLXSequenceCache):
        cache.declare_step([(0, tokens)])
    given = rows(tokens)
    answers = [cache.attend(layer, given, given, given, 1.0) for layer in range(4)]
    mx.eval(answers, cache.state)

def append(cache, tokens):
    given = mx.ones((1, 1, tokens, 64))
    mx.eval([layer.update_and_fetch(given, given) for layer in cache.layers])

def shared(kind, config):
    cache = kind(geometry(0), config)
    cache.new()
    return cache

def config(size):
    return CacheConfig(FAR, initial_capacity=size)

def run(layout, size):
    if layout == "flat":
        step(MLXSequenceCache(geometry(0), config(size)), 3)
    elif layout == "rings":
        step(MLXSequenceCache(geometry(FAR), config(size)), 3)
    elif layout == "cells":
        step(shared(MLXCellCache, config(size)), 3)
    elif layout == "batched":
        step(shared(MLXBatchedSequenceCache, config(size)), 3)
    elif layout == "reserve":
        cache = MLXSequenceCache(geometry(0), config(4))
        step(cache, 3)
        cache.reserve(size)
        step(cache, 1)
    elif layout == "reserve cells":
        cache = shared(MLXCellCache, config(4))
        step(cache, 3)
        cache.reserve(size)
        step(cache, 1)

def fits(layout, size):
    try:
        run(layout, size)
    except MemoryLimitError as error:
        assert str(error.needed) in str(error) and str(error.available) in str(error)
        return error.fits
    return None

def grown():
    # As many bytes a position as above, in more layers: less of it is copied at once.
    layers = (LayerGeometry(LayerPolicy.flat(), kv_heads=1, key_dim=64, value_dim=64),) * 32
    cache = MLXSequenceCache(CacheGeometry(layers), CacheConfig(FAR, initial_capacity=800))
    sizes = []
    while True:
        before = cache.length, cache.nbytes
        try:
            append(cache, 500)
        except MemoryLimitError as error:
            assert (cache.length, cache.nbytes) == before
            break
        sizes.append(cache.layers[0].rows)
    # It goes on where it stands.
    cache.rewind(cache.length - 400)
    append(cache, 300)
    return sorted(set(sizes))

# The threads of MLX take their share of the address space at the first step.
run("flat", 4)
facts = json.loads(sys.argv[1])
answers = {layout: fits(layout, size) for layout, size in facts.items()}
if sys.argv[3:]:
    answers["grown"] = grown()
print(json.dumps(answers))
"""
LAYOUTS = ("flat", "rings", "cells", "batched", "reserve", "reserve cells")


def limited(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        # A library that is loaded before takes address space of its own.
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )


def python(sizes: dict[str, int], *more: str) -> dict[str, Any]:
    done = limited(sys.executable, "-c", CODE, json.dumps(sizes), str(FAR), *more)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_each_layout_names_what_can_be_had() -> None:
    named = python(dict.fromkeys(LAYOUTS, FAR), "and grow")
    sizes = named.pop("grown")
    row_bytes = 4 * 4 * (128 + 128) * 4
    for layout, size in named.items():
        assert size is not None, f"{layout} was not refused"
        assert LIMIT / 4 < size * row_bytes < LIMIT, layout
    assert python(named) == dict.fromkeys(LAYOUTS)
    doubled = [800 * 2**power for power in range(len(sizes))]
    assert sizes[:-1] == doubled[:-1]
    assert sizes[-2] < sizes[-1] < doubled[-1], "the last growth is as large as can be had"


def generate(directory: Path, *choices: object) -> subprocess.CompletedProcess[str]:
    arguments = ("generate", words(5, 17, 40), "--model", directory, "--max-tokens", 4, *choices)
    return limited(*COMMAND, *map(str, arguments))


def test_generate_ends_in_one_line(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    far = 100 * FAR
    refused = generate(directory, "--capacity", far, "--initial-capacity", far)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = [line for line in refused.stderr.splitlines() if "PyTorch" not in line]
    found = re.fullmatch(
        r"error: rows for 100000000 positions need (\d+) bytes \([\d.]+ GiB\) more, but (\d+) "
        r"bytes \([\d.]+ MiB\) can be had, enough for (\d+) positions; lower .*",
        line,
    )
    assert found, line
    needed, available, fits = map(int, found.groups())
    assert fits * needed / far < available < LIMIT < needed
    answer = generate(directory, "--capacity", fits, "--initial-capacity", fits)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.split()) == 4
