"""Arrays for the kernel tests: their shapes, their layouts in memory, and comparison by bits."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from tests.support.arrays import bits

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
LAYOUTS = (
    "contiguous",
    "transposed",
    "offset",
    "reversed",
    "broadcast",
    "mirrored",
    "spaced",
    "constant",
)

#: Head dims that are moved in wide packs, and ones that are moved element by element.
DIMS = (8, 16, 64, 80, 9, 33)


def random_array(seed: int, shape: tuple[int, ...], dtype: mx.Dtype, layout: str) -> mx.array:
    """Normal numbers of [B, H, rows, D], lying in memory as `layout` says.

    contiguous; transposed: rows before heads, as a projection leaves them; offset: a slice of
    longer rows, so that no row is aligned; reversed: rows from the last to the first (a negative
    stride); broadcast: all heads the same memory; mirrored: columns from the last to the first;
    spaced: every other column of longer rows; constant: all columns of a row the same memory.
    """
    batch, heads, rows, dim = shape
    generator = np.random.default_rng(seed)

    def normal(*sizes: int) -> mx.array:
        return mx.array(generator.standard_normal(sizes).astype(np.float32)).astype(dtype)

    if layout == "contiguous":
        array = normal(batch, heads, rows, dim)
    elif layout == "transposed":
        array = normal(batch, rows, heads, dim).transpose(0, 2, 1, 3)
    elif layout == "offset":
        array = normal(batch, heads, rows + 1, dim + 2)[:, :, 1:, 1 : dim + 1]
    elif layout == "reversed":
        array = normal(batch, heads, rows, dim)[:, :, ::-1]
    elif layout == "broadcast":
        array = mx.broadcast_to(normal(batch, 1, rows, dim), shape)
    elif layout == "mirrored":
        array = normal(batch, heads, rows, dim)[..., ::-1]
    elif layout == "spaced":
        array = normal(batch, heads, rows, 2 * dim)[..., 1::2]
    else:
        array = mx.broadcast_to(normal(batch, heads, rows, 1), shape)
    assert array.shape == shape
    mx.eval(array)
    return array


def laid_out(array: mx.array, layout: str) -> mx.array:
    """The same numbers of [B, H, rows, D], lying as `random_array` says (not broadcast)."""
    if layout == "transposed":
        moved = mx.contiguous(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    elif layout == "reversed":
        moved = mx.contiguous(array[:, :, ::-1])[:, :, ::-1]
    elif layout == "mirrored":
        moved = mx.contiguous(array[..., ::-1])[..., ::-1]
    elif layout == "spaced":
        moved = mx.repeat(array, 2, axis=3)[..., ::2]
    else:
        assert layout == "contiguous", layout
        moved = mx.contiguous(array)
    mx.eval(moved)
    return moved


def assert_same_bits(got: mx.array, wanted: mx.array | np.ndarray, what: str) -> None:
    """Fails with the first element that differs."""
    wanted_bits = wanted if isinstance(wanted, np.ndarray) else bits(wanted)
    got_bits = bits(got)
    assert got_bits.shape == wanted_bits.shape, f"{what}: {got_bits.shape}, {wanted_bits.shape}"
    differs = np.argwhere(got_bits != wanted_bits)
    assert len(differs) == 0, f"{what}: {len(differs)} elements differ, first at {differs[0]}"


@dataclass(frozen=True)
class RingCase:
    """A ring, the rows of a step, and a slot."""

    seed: int
    dtype: mx.Dtype
    batch: int
    heads: int
    slots: int
    steps: int
    dim: int
    slot: int
    ring_layout: str
    rows_layout: str

    @property
    def ring(self) -> mx.array:
        shape = (self.batch, self.heads, self.slots, self.dim)
        return random_array(self.seed, shape, self.dtype, self.ring_layout)

    @property
    def rows(self) -> mx.array:
        shape = (self.batch, self.heads, self.steps, self.dim)
        return random_array(self.seed + 1, shape, self.dtype, self.rows_layout)


@st.composite
def ring_cases(draw: st.DrawFn) -> RingCase:
    """Starts at 0, R-1 or anywhere; steps of 1, R-1, R, R+1, 3R or anything between."""
    slots = draw(st.integers(1, 24))
    edges = {1, slots - 1, slots, slots + 1, 3 * slots} - {0}
    return RingCase(
        seed=draw(st.integers(0, 2**20)),
        dtype=draw(st.sampled_from(DTYPES)),
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        slots=slots,
        steps=draw(st.sampled_from(sorted(edges)) | st.integers(1, 3 * slots)),
        dim=draw(st.sampled_from(DIMS)),
        slot=draw(st.sampled_from([0, slots - 1]) | st.integers(0, slots - 1)),
        ring_layout=draw(st.sampled_from(LAYOUTS)),
        rows_layout=draw(st.sampled_from(LAYOUTS)),
    )
