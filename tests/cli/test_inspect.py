"""`inspect`: the figures that it gives are those of real caches, family by family."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from mlx_kvcache import CacheGeometry, make_prompt_cache
from mlx_kvcache.commands.figures import ranges_text, size_text
from mlx_kvcache.commands.loading import position_limit
from mlx_kvcache.errors import KVCacheError
from mlx_kvcache.facts.layer_kinds import layer_groups, summary
from mlx_kvcache.integrations.tracing import is_kv_cache, leaves
from tests.support.tiny_models import all_families, build, random_tokens
from tests.support.tiny_models_on_disk import config_of

COUNT = 21


def write_config(directory, family):
    path = directory / "config.json"
    path.write_text(json.dumps(config_of(family)))
    return path


def inspected(run, *arguments):
    result = run("inspect", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3_text",
        "gemma3n",
        "gemma4",
        "deepseek_v3",
        "falcon_h1",
        "iquestloopcoder",
        "llama4",
        "longcat_flash",
        "nemotron_h",
        "qwen3_next",
    ],
)
def test_the_bytes_are_those_of_caches_that_a_model_filled(run, tmp_path, family):
    told = inspected(
        run, write_config(tmp_path, family), "--context", COUNT, "--kv-dtype", "float32"
    )
    model = build(family, config_of(family))
    ours = make_prompt_cache(model, capacity=told["capacity"])
    theirs = make_mlx_lm_cache(model)
    for token in random_tokens(model, COUNT):
        for cache in (ours, theirs):
            mx.eval(model(mx.array([[token]]), cache=cache))
    assert told["total"]["mlx_kvcache"] == {
        "used": ours.sequence.nbytes_used,
        "allocated": ours.sequence.nbytes,
    }
    arrays = [leaf for entry in theirs for leaf in leaves(entry) if is_kv_cache(leaf)]
    assert told["total"]["mlx_lm"]["allocated"] == sum(cache.nbytes for cache in arrays)
    assert told["model_type"] == config_of(family)["model_type"]
    fewer = inspected(
        run, write_config(tmp_path, family), "--context", COUNT - 1, "--kv-dtype", "float32"
    )
    assert fewer["total"]["mlx_kvcache"]["used"] < told["total"]["mlx_kvcache"]["used"]


def test_every_family_is_described_whole():
    described = 0
    for family, config in all_families().items():
        try:
            geometry = CacheGeometry.from_hf(config)
        except KVCacheError:
            continue
        described += 1
        groups = layer_groups(geometry)
        owned = [index for group in groups if group.kind.owns_rows for index in group.cache_layers]
        assert sorted(owned) == list(range(len(geometry.layers))), family
        named = {number for group in groups for number in group.model_layers}
        assert named == set(range(len(geometry.model_layers))), family
        assert sum(geometry.layers[index].elements_per_position for index in owned) == sum(
            layer.elements_per_position for layer in geometry.layers
        )
    assert described > 80


def test_groups_of_a_model_that_shares(run, tmp_path):
    told = inspected(run, write_config(tmp_path, "gemma3n"))
    groups = [
        (group["kind"], group["model_layers"], group["cache_layers"], group["shared_with"])
        for group in told["groups"]
    ]
    assert groups == [
        ("ring", [0, 1, 3, 4], [0, 1, 3, 4], None),
        ("flat", [2], [2], None),
        ("shared", [5, 7], [2, 2], 2),
        ("shared", [6], [4], 4),
    ]
    assert told["groups"][2]["mlx_kvcache"] == {"used": 0, "allocated": 0}


def test_groups_of_a_hybrid(run, tmp_path):
    told = inspected(run, write_config(tmp_path, "nemotron_h"))
    kinds = [(group["kind"], group["model_layers"]) for group in told["groups"]]
    assert kinds == [("recurrent", [0, 4]), ("none", [1, 3]), ("flat", [2, 5])]
    both = inspected(run, write_config(tmp_path, "falcon_h1"))["groups"]
    assert [(group["kind"], group["has_state"]) for group in both] == [("flat", True)]


def test_bytes_per_token_and_the_default_context(run, tmp_path):
    path = write_config(tmp_path, "gemma3_text")
    told = inspected(run, path)
    # One KV head of 16 dims, keys and values, 2 bytes: 64 bytes a layer; two layers are flat.
    assert told["bytes_per_token"] == {"all": 6 * 64, "flat": 2 * 64, "ring": 4 * 64}
    assert told["tokens"] == told["capacity"] == 512
    assert told["kv_dtype"] == "bfloat16"
    assert told["total"]["mlx_lm"]["allocated"] == 2 * 512 * 64 + 4 * 8 * 64
    # While 512 tokens are prefilled in one chunk, the windows are not cut.
    assert told["total"]["mlx_lm"]["allocated_during_prefill"] == 6 * 512 * 64
    wide = inspected(run, path, "--kv-dtype", "float32")
    assert wide["total"]["mlx_kvcache"]["used"] == 2 * told["total"]["mlx_kvcache"]["used"]


def test_a_context_beyond_the_models_is_answered(run, tmp_path):
    told = inspected(run, write_config(tmp_path, "gemma3_text"), "--context", "1000")
    assert told["tokens"] == told["capacity"] == 1000


def test_a_config_without_a_context_length(run, tmp_path):
    config = {key: value for key, value in config_of("llama").items() if "position" not in key}
    config.pop("rope_scaling", None)
    path = tmp_path / "any-name.json"
    path.write_text(json.dumps(config))
    told = inspected(run, path)
    assert told["tokens"] == 32768
    assert told["capacity"] is None


@pytest.mark.parametrize("name", ["directory", "config.json", "renamed.json"])
def test_a_directory_a_config_and_a_renamed_one(run, tmp_path, name):
    path = write_config(tmp_path, "llama")
    (tmp_path / "renamed.json").write_text(path.read_text())
    told = inspected(run, tmp_path if name == "directory" else tmp_path / name)
    assert told["summary"] == "2 flat + 2 ring(8)"


def test_the_report_for_a_person(run, tmp_path):
    result = run("inspect", write_config(tmp_path, "gemma3n"), "--context", "4000")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["0-1,", "3-4", "ring", "8", "2", "16", "16", "128"] in lines
    assert ["5,", "7", "shared", "with", "layer", "2", "-", "2", "16", "16", "-"] in lines
    told = inspected(run, tmp_path / "config.json", "--context", "4000")
    for name, key in (("mlx_kvcache", "mlx_kvcache"), ("mlx-lm's caches", "mlx_lm")):
        total = told["total"][key]
        sizes = [*size_text(total["used"]).split(), *size_text(total["allocated"]).split()]
        assert [*name.split(), *sizes, f"{total['allocated']:,}"] in lines
    assert "█" in result.stdout
    assert "4 ring(8)" in result.stdout
    assert "100%" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "\x1b" not in result.stdout


def test_bars_are_as_long_as_their_bytes(run, tmp_path):
    config = config_of("llama", {"sliding_window": 256})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = run("inspect", path, "--context", "512")
    bars = [line.count("█") for line in result.stdout.splitlines() if "█" in line]
    # Two rings of 256 + 63 rows and two flat layers of 512: a bar of 36 is all of them.
    assert bars == pytest.approx([36 * rows / (319 + 512) for rows in (319, 512, 256, 512)], abs=1)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 1, 3), "0-1, 3"),
        ((0, 2, 4), "0, 2, 4"),
        ((0, 2, 4, 6, 8), "0, 2, ... 8"),
        ((0, 1, 3, 4, 6, 7, 9, 10), "0-1, 3-4, ... 9-10"),
        ((0, 1, 3, 4, 6, 7, 9, 10, 12), "0-1, 3-4, ... 9-10, 12"),
        ((0, 2, 4, 7, 9), "0, 2, 4, 7, 9"),
        ((0, 1, 3, 5, 7), "0-1, 3, 5, 7"),
    ],
)
def test_ranges(numbers, text):
    assert ranges_text(numbers) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (2**70, "1048576.0 PiB"),
    ],
)
def test_sizes(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"max_position_embeddings": None, "n_ctx": 16}, 16),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": "64"}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 9, "text_config": {}}, 9),
        ({"text_config": 3}, None),
    ],
)
def test_the_context_length_of_a_config(config, limit):
    assert position_limit(config) == limit


def test_summaries():
    families = all_families()
    assert summary(CacheGeometry.from_hf(families["llama"])) == "2 flat + 2 ring(8)"
    hybrid = summary(CacheGeometry.from_hf(families["qwen3_next"]))
    assert hybrid == "2 flat + 2 recurrent (kept by mlx-lm)"
