"""Which path is taken: the rule by bytes, the environment, and the device."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_kvcache.errors import ConfigError, KernelUnavailableError
from mlx_kvcache.store import choice as kernel_choice
from mlx_kvcache.store import kernels
from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store.choice import PathCosts, Traffic, cheaper_path

RING = mx.arange(2 * 8 * 4, dtype=mx.float32).reshape(1, 2, 8, 4)
ROWS = -mx.ones((1, 2, 3, 4))


@pytest.fixture(autouse=True)
def _fresh_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(kernel_choice.PATH_VARIABLE, raising=False)
    kernel_choice.forced_path.cache_clear()
    yield
    kernel_choice.forced_path.cache_clear()


def force(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(kernel_choice.PATH_VARIABLE, value)
    kernel_choice.forced_path.cache_clear()


def test_fewer_bytes_win_then_fewer_dispatches_and_a_tie_goes_to_the_ops() -> None:
    assert cheaper_path(PathCosts(Traffic(9, 5), Traffic(10, 1))) == "metal"
    assert cheaper_path(PathCosts(Traffic(11, 1), Traffic(10, 5))) == "ops"
    assert cheaper_path(PathCosts(Traffic(10, 1), Traffic(10, 2))) == "metal"
    assert cheaper_path(PathCosts(Traffic(10, 1), Traffic(10, 1))) == "ops"


@pytest.mark.parametrize(
    ("steps", "runs", "shared", "wanted"),
    [
        (1, 1, False, "ops"),  # a decode step: 2 rows moved against 2 R
        (511, 2, False, "ops"),
        (512, 1, False, "ops"),  # the whole ring in one run: a tie
        (512, 2, False, "metal"),  # the whole ring in two runs: one dispatch less
        (4096, 2, False, "metal"),  # only the newest R rows count
        (1, 1, True, "metal"),  # a fork holds the ring: MLX would copy it first
    ],
)
def test_ring_write(steps: int, runs: int, shared: bool, wanted: str) -> None:
    costs = kernel_choice.ring_write_costs(steps, 512, 2048, runs=runs, shared=shared)
    assert cheaper_path(costs) == wanted


def test_ring_write_counts_bytes_read_and_written() -> None:
    costs = kernel_choice.ring_write_costs(3, 10, 100, runs=2, shared=True)
    assert costs == PathCosts(metal=Traffic(2000, 1), ops=Traffic(2600, 3))


def test_ring_join_takes_the_kernel_since_it_is_one_dispatch() -> None:
    assert cheaper_path(kernel_choice.ring_join_costs(500, 64, 8, runs=2)) == "metal"
    assert cheaper_path(kernel_choice.ring_join_costs(500, 64, 8, runs=1)) == "metal"
    assert cheaper_path(kernel_choice.ring_join_costs(500, 0, 8, runs=1)) == "ops"


def test_the_quantized_write_crosses_over_at_half_the_ring() -> None:
    def path(steps: int) -> str:
        return cheaper_path(
            kernel_choice.ring_write_quantized_costs(steps, 512, 256, 72, runs=1, shared=False)
        )

    assert [path(steps) for steps in (1, 255, 257, 512)] == ["ops", "ops", "metal", "metal"]


def test_cells_take_the_ops_unless_the_pool_is_held_elsewhere() -> None:
    assert cheaper_path(kernel_choice.cell_scatter_costs(8, 64, 8, shared=False)) == "ops"
    assert cheaper_path(kernel_choice.cell_scatter_costs(8, 64, 8, shared=True)) == "metal"
    assert cheaper_path(kernel_choice.cell_gather_costs(8, 8)) == "ops"


def test_the_functions_ask_the_rule_and_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Metal device pretended, the launch that would go to the GPU is the kernel's."""
    launched: list[str] = []

    def record(launch: metal_kernels.Launch) -> tuple[mx.array, ...]:
        launched.append(launch.name)
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        return tuple(mx.zeros(shape, dtype) for shape, dtype in shapes)

    monkeypatch.setattr(kernels, "metal_is_current", lambda: True)
    monkeypatch.setattr(metal_kernels, "run", record)
    kernels.ring_write(RING, ROWS, 6)
    assert launched == []
    kernels.ring_write(RING, ROWS, 6, shared=True)
    kernels.ring_join(RING, ROWS, 6, 5)
    pool = mx.quantize(mx.zeros((1, 1, 4, 64), mx.bfloat16), group_size=32, bits=4)
    kernels.ring_write_quantized(*pool, mx.zeros((1, 1, 3, 64), mx.bfloat16), 0)
    assert launched == [
        "kv_ring_write_float32_pack4",
        "kv_ring_join_float32_pack4",
        "kv_ring_write_quantized_bfloat16_g32_b4_gpu",
    ]
    force(monkeypatch, "ops")
    kernels.ring_write(RING, ROWS, 6, shared=True)
    assert len(launched) == 3
    force(monkeypatch, "metal")
    kernels.ring_write(RING, ROWS, 6)
    kernels.cell_gather(RING, [1, 2])
    assert launched[3:] == ["kv_ring_write_float32_pack4", "kv_cell_gather_float32_pack4_tiny1"]


@pytest.mark.skipif(mx.metal.is_available(), reason="says what happens where Metal is missing")
def test_forcing_metal_without_metal_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, "metal")
    with pytest.raises(KernelUnavailableError, match="no Metal"):
        kernels.ring_write(RING, ROWS, 0)
    with pytest.raises(RuntimeError, match="MLX_KVCACHE_KERNELS=metal"):
        kernels.cell_gather(RING, [0])
    for value in ("ops", "auto", ""):
        force(monkeypatch, value)
        assert kernels.ring_write(RING, ROWS, 0).shape == RING.shape


def test_on_the_cpu_stream_of_a_mac_the_ops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_metal", lambda: True)
    with mx.stream(mx.cpu):
        assert not kernels.metal_is_current()
        assert kernels.ring_write(RING, ROWS, 6, shared=True).shape == RING.shape
        force(monkeypatch, "metal")
        with pytest.raises(KernelUnavailableError, match="make the GPU the default device"):
            kernels.ring_write(RING, ROWS, 6)


def test_an_unknown_value_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "cuda")
    with pytest.raises(ConfigError, match="auto, metal or ops, got 'cuda'"):
        kernels.ring_write(RING, ROWS, 0)


def test_misfitting_rows_are_refused() -> None:
    with pytest.raises(kernels.UpdateShapeError, match="batch, heads and head dim"):
        kernels.ring_write(RING, ROWS[:, :1], 0)
    with pytest.raises(kernels.UpdateShapeError, match=r"\[B, H, rows, D\]"):
        kernels.ring_join(RING[0], ROWS, 0, 1)
    with pytest.raises(kernels.UpdateDtypeError, match="cast the rows"):
        kernels.ring_write(RING, ROWS.astype(mx.float16), 0)
    for slot in (-1, 8, True, 1.0):
        with pytest.raises(kernels.PositionError, match="slot of the ring of 8"):
            kernels.ring_write(RING, ROWS, slot)  # type: ignore[arg-type]
    for count in (-1, 9):
        with pytest.raises(kernels.PositionError, match="old_count"):
            kernels.ring_join(RING, ROWS, 0, count)
