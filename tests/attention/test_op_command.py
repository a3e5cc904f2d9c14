"""`mlx-kvcache op`: it agrees with its recomputation, and notices when anything does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_kvcache.cache import masks
from mlx_kvcache.cache.layer import SequenceLayer
from mlx_kvcache.commands import op_run
from mlx_kvcache.commands.app import app
from mlx_kvcache.commands.op_options import OpOptions
from mlx_kvcache.commands.op_request import OpRequest
from tests.support.attention_oracle import AttentionOracle


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["op", *(str(argument) for argument in arguments)])


def report(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    facts = json.loads(done.stdout)
    assert facts["passed"] == (done.exit_code == 0)
    return facts


RING = ("--kv-cache", "64,2,1,8", "--windows", "4,0", "--spare", "2", "--steps", "9,1,1,2,3")


def test_flat_layers() -> None:
    done = run("--kv-cache", "64,2,4,16")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("step 0 (positions 0-4) layer 0 (flat): max abs error ")
    assert lines[5].startswith("step 2 (positions 6-6) layer 1 (flat)")
    assert lines[6].startswith("all 6 within the tolerance")


def test_everything_at_once() -> None:
    facts = report(
        *("--kv-cache", "64,3,2,8,bfloat16", "--windows", "0,1,5", "--spare", "3"),
        *("--steps", "1,7,1,1,9,2", "--query-heads", "6", "--value-dim", "5", "--batch", "2"),
        *("--sinks", "--softcap", "3", "--scale", "0.9", "--seed", "4"),
    )
    assert facts["passed"]
    assert len(facts["results"]) == 18
    assert facts["cache"]["windows"] == [0, 1, 5]
    assert (facts["query_heads"], facts["batch"], facts["sinks"]) == (6, 2, True)
    assert (facts["softcap"], facts["scale"]) == (3.0, 0.9)
    assert facts["cache"]["value_dim"] == 5
    for result in facts["results"]:
        assert 0 <= result["max_abs_error"] < 1e-5
        assert result["storage_error"] > 1e-4, "bfloat16 rounds, and the figure must say so"


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0, 0), ("float16", 1e-5, 4e-3)])
def test_what_the_storage_dtype_alone_costs(dtype: str, least: float, most: float) -> None:
    facts = report("--kv-cache", f"64,1,2,8,{dtype}")
    errors = [result["storage_error"] for result in facts["results"]]
    assert least <= max(errors) <= most


def test_the_seed_decides_the_tensors() -> None:
    first = [result["max_abs_error"] for result in report(*RING, "--seed", "1")["results"]]
    again = [result["max_abs_error"] for result in report(*RING, "--seed", "1")["results"]]
    other = [result["max_abs_error"] for result in report(*RING, "--seed", "2")["results"]]
    assert first == again
    assert first != other


def test_an_error_above_the_tolerance_ends_in_status_1() -> None:
    done = run(*RING, "--tolerance", "1e-12")
    assert done.exit_code == 1
    assert re.search(r"max abs error \S+  ABOVE", done.stdout)
    assert re.search(r"\d+ of 10 ABOVE the tolerance", done.stdout)
    assert not report(*RING, "--tolerance", "1e-12")["passed"]


def plant_wide_window(patch: pytest.MonkeyPatch) -> None:
    right = masks._visible
    patch.setattr(masks, "_visible", lambda *parts: right(*parts[:2], parts[2] and parts[2] + 1))


def plant_upper_left(patch: pytest.MonkeyPatch) -> None:
    right = mx.fast.scaled_dot_product_attention

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        if isinstance(options["mask"], str):
            tokens, rows = queries.shape[2], keys.shape[2]
            options["mask"] = mx.arange(rows)[None] <= mx.arange(tokens)[:, None]
        return right(queries, keys, values, **options)

    patch.setattr(mx.fast, "scaled_dot_product_attention", attention)


def plant_lost_row(patch: pytest.MonkeyPatch) -> None:
    right = SequenceLayer.update_and_fetch

    def update(layer: Any, keys: mx.array, values: mx.array) -> Any:
        answer = right(layer, keys, values)
        if layer.offset == 10:
            layer.keys = layer.keys * 0
        return answer

    patch.setattr(SequenceLayer, "update_and_fetch", update)


def plant_not_a_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(op_run, "update_and_attend", lambda queries, *_, **__: queries * float("nan"))


@pytest.mark.parametrize(
    "plant", [plant_wide_window, plant_upper_left, plant_lost_row, plant_not_a_number]
)
def test_a_planted_bug_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    assert report(*RING)["passed"]
    plant(monkeypatch)
    facts = report(*RING)
    assert not facts["passed"]
    failed = [result["max_abs_error"] for result in facts["results"] if not result["passed"]]
    assert all(error is None or error > 1e-2 for error in failed)


def test_a_bug_in_the_recomputation_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    right = op_run.visible
    monkeypatch.setattr(
        op_run, "visible", lambda start, tokens, window: right(start, tokens, window // 2)
    )
    assert not report(*RING)["passed"]


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_recomputation_is_the_oracles(
    dtype: str | None, softcap: float | None, sinks: bool
) -> None:
    cache = "64,3,2,8" if dtype is None else f"64,3,2,8,{dtype}"
    request = OpRequest.of(
        OpOptions(
            cache, "0,1,4", "5,1,1,9", spare=2, query_heads=4, value_dim=5, batch=2, sinks=sinks,
            softcap=softcap, scale=0.6, seed=3,
        )
    )  # fmt: skip
    tensors = request.tensors
    oracle = AttentionOracle(request.geometry, dtype)
    position = 0
    for tokens in request.steps:
        rows = slice(position, position + tokens)
        for layer in range(3):
            arrays = (tensors.queries, tensors.keys, tensors.values)
            step = [array[layer][:, :, rows] for array in arrays]
            truth = oracle.step(layer, *step, 0.6, sinks=tensors.sinks, softcap=softcap)
            mine = op_run.recomputed(request, layer, position, tokens, dtype)
            assert np.abs(mine - truth).max() < 1e-5
            other = op_run.recomputed(request, layer, position, tokens)
            assert dtype is None or np.abs(other - truth).max() > 1e-5
        position += tokens


def save(path: Path, layers: int | None = None, **changes: Any) -> Path:
    """An .npz of 2 KV heads, 4 query heads, 6 positions, dim 8 and value dim 5."""
    random = np.random.default_rng(3)
    outer = (1,) if layers is None else (layers, 1)
    arrays = {
        "queries": random.standard_normal((*outer, 4, 6, 8)),
        "keys": random.standard_normal((*outer, 2, 6, 8)).astype(np.float16),
        "values": random.standard_normal((*outer, 2, 6, 5)).astype(np.float32),
        **changes,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize("layers", [None, 3])
def test_given_tensors(tmp_path: Path, layers: int | None) -> None:
    path = save(tmp_path / "given.npz", layers, sinks=np.zeros(4))
    facts = report("--kv-cache", "64,3,2,8,float16", "--tensors", path, "--steps", "4,2")
    assert facts["passed"]
    assert len(facts["results"]) == 6
    assert (facts["query_heads"], facts["sinks"]) == (4, True)
    errors = [result["storage_error"] for result in facts["results"][:3]]
    assert min(errors) > 0
    assert (len(set(errors)) == 1) == (layers is None)
    assert [
        result["tokens"]
        for result in report("--kv-cache", "64,3,2,8", "--tensors", path)["results"]
    ] == [6, 6, 6]


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "no keys": ({"keys": None}, "has no keys"),
    "integers": ({"keys": np.zeros((1, 2, 6, 8), int)}, "floating-point"),
    "objects": ({"keys": np.array([None, "x"], dtype=object)}, "not an .npz file of numbers"),
    "three axes": ({"keys": np.zeros((2, 6, 8))}, "4 or 5 axes"),
    "other layers": ({"keys": np.zeros((2, 1, 2, 6, 8))}, "2 cache layers"),
    "other positions": ({"values": np.zeros((1, 2, 5, 5))}, "do not fit together"),
    "other dims": ({"queries": np.zeros((1, 4, 6, 9))}, "do not fit together"),
    "no positions": (
        {
            "queries": np.zeros((1, 4, 0, 8)),
            "keys": np.zeros((1, 2, 0, 8)),
            "values": np.zeros((1, 2, 0, 5)),
        },
        "do not fit together",
    ),
    "sinks of other form": ({"sinks": np.zeros((2, 2))}, "sinks must be numbers"),
    "sinks of other count": ({"sinks": np.zeros(3)}, "sinks must be"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be(tmp_path: Path, name: str) -> None:
    changes, message = BAD_FILES[name]
    done = run("--kv-cache", "64,1,2,8", "--tensors", save(tmp_path / "bad.npz", **changes))
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("keys")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "empty.npz").touch()
    for name in ("text.npz", "one.npy", "empty.npz"):
        done = run("--kv-cache", "64,1,2,8", "--tensors", tmp_path / name)
        assert done.exit_code == 2, name
        assert "error: " in done.stderr
    missing = run("--kv-cache", "64,1,2,8", "--tensors", tmp_path / "none.npz")
    assert missing.exit_code == 1
    assert "none.npz" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache", "64,1,2"], "capacity,layers,heads,dim[,dtype]"),
        (["--kv-cache", "64,1,2,8,float16,9"], "capacity,layers,heads,dim[,dtype]"),
        (["--kv-cache", "64,1,two,8"], "heads must be an integer"),
        (["--kv-cache", "64,0,2,8"], "layers must be an integer from 1"),
        (["--kv-cache", "-4,1,2,8"], "capacity must be an integer from 1"),
        (["--kv-cache", "64,1,2,8,int8"], "dtype is one of"),
        (["--kv-cache", "6,1,2,8"], "more than the capacity 6"),
        (["--kv-cache", "64,1,2,8", "--steps", "5,0"], "a step must be"),
        (["--kv-cache", "64,1,2,8", "--steps", "5,,1"], "a step must be"),
        (["--kv-cache", "64,2,2,8", "--windows", "1,2,3"], "3 windows were given"),
        (["--kv-cache", "64,2,2,8", "--windows", "-1"], "a window must be"),
        (["--kv-cache", "64,1,2,8", "--query-heads", "3"], "multiple of the KV heads"),
        (["--kv-cache", "64,1,2,8", "--softcap", "0"], "softcap must be"),
        (["--kv-cache", "64,1,2,8", "--scale", "nan"], "scale must be finite"),
        (["--kv-cache", "64,1,2,8", "--tolerance", "0"], "--tolerance must be"),
        (["--kv-cache", "64,1,2,8", "--spare", "0"], "spare"),
        ([], "--kv-cache"),
    ],
)
def test_requests_that_cannot_be(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_tensors_that_do_not_fit_the_options(tmp_path: Path) -> None:
    path = save(tmp_path / "given.npz")
    for cache, more, message in (
        ("64,1,4,8", [], "says 4 heads of dim 8"),
        ("64,1,2,16", [], "says 2 heads of dim 16"),
        ("64,1,2,8", ["--steps", "4,1"], "are 5 positions"),
        ("64,1,2,8", ["--seed", "0"], "--seed is for random tensors"),
        ("64,1,2,8", ["--value-dim", "5"], "--value-dim is for random tensors"),
        ("64,1,2,8", ["--sinks"], "--sinks is for random tensors"),
    ):
        done = run("--kv-cache", cache, "--tensors", path, *more)
        assert done.exit_code == 2
        assert message in " ".join(done.stderr.split())
