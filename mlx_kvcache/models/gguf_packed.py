"""Quantized GGUF blocks as MLX's quantized weights: the same numbers, still packed.

A block of Q4_0, Q4_1 or Q8_0 is 32 codes with one float16 scale, which is MLX's affine form of
group size 32: weight = scale * code + bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_kvcache.models.gguf_file import GGUFFile
from mlx_kvcache.models.gguf_weights import Parameter

GROUP_SIZE = 32

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
#: Codes, scales and biases, shaped (blocks, 32), (blocks, 1) and (blocks, 1).
Parts = tuple[Bytes, Halves, Halves]


@dataclass(frozen=True)
class Packing:
    """How blocks of one ggml type are packed: bits of a code, bytes of a block, their parts."""

    bits: int
    block_bytes: int
    parts: Callable[[Bytes], Parts]

    def nbytes(self, count: int) -> int:
        """The bytes of `count` weights: the codes, and a scale and a bias of 16 bits a group."""
        return count * self.bits // 8 + count // GROUP_SIZE * 4


def _nibbles(block: Bytes) -> Bytes:
    """The 32 codes in 16 bytes: the low halves of all, then the high ones."""
    return np.concatenate([block & np.uint8(15), block >> np.uint8(4)], axis=1)


def _half(block: Bytes) -> Halves:
    return np.ascontiguousarray(block).view(np.float16)


def _q4_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scale, scale * np.float16(-8)


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[:, :2])
    # Signed codes, from -128.
    return blocks[:, 2:] ^ np.uint8(128), scale, scale * np.float16(-128)


PACKINGS = {
    "Q4_0": Packing(4, 18, _q4_0),
    "Q4_1": Packing(4, 20, _q4_1),
    "Q8_0": Packing(8, 34, _q8_0),
}


def packing(file: GGUFFile, parameter: Parameter) -> Packing | None:
    """How MLX can hold the parameter packed; None where it cannot, or it is no matrix."""
    tensor = file.tensors[parameter.source]
    if len(parameter.shape) != 2 or parameter.shape[1] % GROUP_SIZE:
        return None
    return PACKINGS.get(tensor.type_name)


def packed_weights(file: GGUFFile, parameter: Parameter, how: Packing) -> dict[str, mx.array]:
    """The parameter as mlx-lm names it: `….weight` (uint32), `….scales` and `….biases` (float16).

    Rows are restored as those of a float weight are.
    """
    rows, columns = parameter.shape
    blocks = np.asarray(file.tensors[parameter.source].packed).reshape(-1, how.block_bytes)
    codes, scales, biases = how.parts(blocks)
    if how.bits == 4:
        # Eight codes in a word, the first in its lowest bits.
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    words = np.ascontiguousarray(codes).view(np.uint32).reshape(rows, -1)
    groups = (rows, columns // GROUP_SIZE)
    name = parameter.target.removesuffix(".weight")
    return {
        f"{name}.weight": mx.array(parameter.restore(words)),
        f"{name}.scales": mx.array(parameter.restore(scales.reshape(groups))),
        f"{name}.biases": mx.array(parameter.restore(biases.reshape(groups))),
    }
