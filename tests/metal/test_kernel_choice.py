"""Which path is taken: the rule by bytes, the environment, and the device."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_kvcache.cache.sequence import MLXSequenceCache
from mlx_kvcache.errors import ConfigError, KernelUnavailableError
from mlx_kvcache.facts.config import CacheConfig
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.store import choice as kernel_choice
from mlx_kvcache.store import kernels
from mlx_kvcache.store import metal as metal_kernels
from mlx_kvcache.store.choice import PathCosts, Traffic, cheaper_path
from mlx_kvcache.store.rows import DenseRows, Placement

RING = mx.arange(2 * 8 * 4, dtype=mx.float32).reshape(1, 2, 8, 4)
ROWS = -mx.ones((1, 2, 3, 4))
MB = 10**6


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
    assert cheaper_path(PathCosts(Traffic(9 * MB, 5), Traffic(10 * MB, 1))) == "metal"
    assert cheaper_path(PathCosts(Traffic(11 * MB, 1), Traffic(10 * MB, 5))) == "ops"
    assert cheaper_path(PathCosts(Traffic(10 * MB, 1), Traffic(10 * MB, 2))) == "metal"
    assert cheaper_path(PathCosts(Traffic(10 * MB, 1), Traffic(10 * MB, 1))) == "ops"


def test_what_moves_sooner_than_a_kernel_is_called_goes_by_ops() -> None:
    """18 microseconds of the host, against 1.6 for each of the ops: 1.64 MB at 100 GB/s."""
    assert cheaper_path(PathCosts(Traffic(0, 1), Traffic(1639999, 1))) == "ops"
    assert cheaper_path(PathCosts(Traffic(0, 1), Traffic(1640001, 1))) == "metal"
    assert cheaper_path(PathCosts(Traffic(0, 1), Traffic(1320001, 3))) == "metal"


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
    assert cheaper_path(kernel_choice.ring_join_costs(500, 64, 2048, runs=2)) == "metal"
    assert cheaper_path(kernel_choice.ring_join_costs(500, 64, 2048, runs=1)) == "metal"
    assert cheaper_path(kernel_choice.ring_join_costs(500, 0, 2048, runs=1)) == "ops"


def test_the_quantized_write_crosses_over_at_half_the_ring() -> None:
    def path(steps: int) -> str:
        return cheaper_path(
            kernel_choice.ring_write_quantized_costs(steps, 512, 4096, 1152, runs=1, shared=False)
        )

    assert [path(steps) for steps in (1, 255, 257, 512)] == ["ops", "ops", "metal", "metal"]


def test_cells_take_the_ops_unless_the_pool_is_held_elsewhere() -> None:
    assert cheaper_path(kernel_choice.cell_scatter_costs(8, 640, 2048, shared=False)) == "ops"
    assert cheaper_path(kernel_choice.cell_scatter_costs(8, 640, 2048, shared=True)) == "metal"
    assert cheaper_path(kernel_choice.cell_gather_costs(600, 600, 2048)) == "ops"
    assert cheaper_path(kernel_choice.cell_gather_costs(600, 640, 2048)) == "metal"
    assert kernel_choice.cell_gather_costs(6, 10, 100) == PathCosts(
        metal=Traffic(1600, 1), ops=Traffic(2800, 3)
    )


def test_the_functions_ask_the_rule_and_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Metal device pretended, the launch that would go to the GPU is the kernel's."""
    launched: list[str] = []

    def record(launch: metal_kernels.Launch) -> tuple[mx.array, ...]:
        launched.append(launch.name)
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        return tuple(mx.zeros(shape, dtype) for shape, dtype in shapes)

    monkeypatch.setattr(kernels, "metal_is_current", lambda: True)
    monkeypatch.setattr(metal_kernels, "run", record)
    ring, rows = mx.zeros((1, 2, 1024, 256)), mx.zeros((1, 2, 8, 256))
    kernels.ring_write(ring, rows, 1020)
    kernels.cell_gather(ring, mx.arange(1024))
    kernels.cell_scatter(ring, rows, mx.arange(8))
    assert launched == []
    kernels.ring_write(ring, rows, 1020, shared=True)
    kernels.ring_join(ring, rows, 1020, 1000)
    pool = mx.quantize(mx.zeros((1, 8, 2048, 64), mx.bfloat16), group_size=32, bits=4)
    kernels.ring_write_quantized(*pool, mx.zeros((1, 8, 1500, 64), mx.bfloat16), 0)
    kernels.cell_scatter(ring, rows, mx.arange(8), shared=True)
    kernels.cell_gather(ring, mx.arange(1000), 1024)
    assert launched == [
        "kv_ring_write_float32_pack4",
        "kv_ring_join_float32_pack4",
        "kv_ring_write_quantized_bfloat16_g32_b4_gpu",
        "kv_cell_scatter_float32_pack4",
        "kv_cell_gather_float32_pack4",
    ]
    kernels.ring_write(RING, ROWS, 6, shared=True)
    force(monkeypatch, "ops")
    kernels.ring_write(RING, ROWS, 6, shared=True)
    assert len(launched) == 5
    force(monkeypatch, "metal")
    kernels.ring_write(RING, ROWS, 6)
    kernels.cell_gather(RING, [1, 2])
    assert launched[5:] == ["kv_ring_write_float32_pack4", "kv_cell_gather_float32_pack4_tiny1"]


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


class Callers:
    """A pretended Metal GPU, and which kernels a store launches on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        monkeypatch.setattr(kernels, "metal_is_current", lambda: True)
        monkeypatch.setattr(metal_kernels, "run", self._run)

    def _run(self, launch: metal_kernels.Launch) -> tuple[mx.array, ...]:
        self.launched.append(launch.kernel.file)
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        return tuple(mx.zeros(shape, dtype) for shape, dtype in shapes)


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> Callers:
    return Callers(monkeypatch)


def sequence(window: int, spare: int) -> MLXSequenceCache:
    layer = LayerGeometry(LayerPolicy.from_window(window), 8, 128, 128)
    return MLXSequenceCache(CacheGeometry((layer,)), CacheConfig(spare=spare))


def rows_of(count: int) -> mx.array:
    return mx.zeros((1, 8, count, 128), mx.bfloat16)


def test_a_step_larger_than_the_spare_rows_joins_by_the_kernel(callers: Callers) -> None:
    """The new ring is cut out of what was joined."""
    cache = sequence(window=1024, spare=64)
    cache.layer(0).update_and_fetch(rows_of(1000), rows_of(1000))
    assert callers.launched == []
    cache.layer(0).update_and_fetch(rows_of(300), rows_of(300))
    assert callers.launched == [metal_kernels.RING_JOIN.file] * 2


def test_a_decode_step_launches_no_kernel(callers: Callers) -> None:
    cache = sequence(window=1024, spare=64)
    cache.layer(0).update_and_fetch(rows_of(1000), rows_of(1000))
    for _ in range(3):
        cache.layer(0).update_and_fetch(rows_of(1), rows_of(1))
    assert callers.launched == []


def test_scattered_cells_after_a_copy_are_written_by_the_kernel(callers: Callers) -> None:
    """A copy holds the pool as well, so that the ops would copy it before they write."""
    store = DenseRows(rows_of(1024), rows_of(1024))
    placement = Placement((), (), mx.array([5, 900, 31], mx.int32))
    store.write(placement, rows_of(3), rows_of(3))
    assert callers.launched == []
    twin = store.copy()
    for written in (store, twin):
        written.write(placement, rows_of(3), rows_of(3))
        written.write(placement, rows_of(3), rows_of(3))
    assert callers.launched == [metal_kernels.CELL_SCATTER.file] * 4


def test_rows_that_move_to_a_larger_store_are_gathered_by_the_kernel(callers: Callers) -> None:
    store = DenseRows(rows_of(1024), rows_of(1024))
    store.move(mx.arange(0, 1024, 2), 512)
    assert callers.launched == []
    store.move(mx.arange(512), 1024)
    assert callers.launched == [metal_kernels.CELL_GATHER.file] * 2
    assert store.rows == 1024


@pytest.mark.parametrize(
    ("weights", "heads", "wanted"),
    [
        (270 * MB, 8, True),  # SmolLM2-135M
        (4300 * MB, 4, False),  # Qwen2.5-7B in 4 bits, few KV heads
        (12000 * MB, 8, False),
        (None, 1, True),  # not known: by what is stored for a token
        (None, 8, False),
    ],
)
def test_the_form_of_a_start_goes_by_the_weights_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch, weights: int | None, heads: int, wanted: bool
) -> None:
    monkeypatch.delenv(kernel_choice.START_FORM_VARIABLE, raising=False)
    geometry = CacheGeometry((LayerGeometry(LayerPolicy.flat(), heads, 128, 128),) * 28)
    config = CacheConfig(weight_bytes=weights)
    assert kernel_choice.prefers_array_start(geometry, config) is (
        wanted or mx.default_device().type == mx.DeviceType.cpu
    )
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert kernel_choice.prefers_array_start(geometry, config) is wanted
