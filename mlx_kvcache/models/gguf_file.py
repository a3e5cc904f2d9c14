"""A GGUF file, read: typed metadata, and tensors that dequantize one at a time.

The format is that of ggml's `docs/gguf.md`; the `gguf` package reads it through a memory map.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlx_kvcache.errors import MissingDependencyError, ModelFormatError, UnsupportedModelError

MAGIC = b"GGUF"

_T = TypeVar("_T")

# What the reader raises on bytes that end early or mean nothing: a slice that is too short, a
# view of the wrong size, an enum value that does not exist, text that is not UTF-8.
_READER_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file, still packed.

    `shape` is in numpy's order, `[out, in]` for a matrix; `type_name` is ggml's (`F16`, `Q4_K`).
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    packed: Any
    tensor_type: Any

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values as float32, shaped `shape`. Raises UnsupportedModelError on a type that
        the `gguf` package cannot unpack."""
        from gguf.quants import dequantize

        try:
            values = dequantize(self.packed, self.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {self.name!r} is stored as {self.type_name}, which the installed gguf "
                "package cannot unpack; use a file in a K-quant, Q4_0 to Q8_0, F16, BF16 or F32"
            ) from error
        return np.asarray(values, dtype=np.float32).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """A file's metadata by key and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """The value of `key`, or None where the file has none. An int passes for a float."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFormatError(
                f"{self.path.name}: metadata {key!r} should be {kind.__name__}, "
                f"it is {type(value).__name__} ({value!r:.80})"
            )
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        """The value of `key`. Raises ModelFormatError where the file has none."""
        value = self.find(key, kind)
        if value is None:
            raise ModelFormatError(
                f"{self.path.name}: metadata {key!r} is missing; the file is incomplete, or was "
                "written by a converter too old for this reader"
            )
        return value


def is_gguf(path: Path) -> bool:
    """Whether the file at `path` begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> GGUFFile:
    """Read the header and the tensor table of the file at `path`.

    Raises ModelFormatError when it is no GGUF file, is cut short or is damaged,
    UnsupportedModelError when it is one part of a split model, MissingDependencyError when
    the `gguf` package cannot be imported.
    """
    reader_class = _reader_class()
    if not is_gguf(path):
        raise ModelFormatError(f"{path} is not a GGUF file: it does not begin with {MAGIC!r}")
    try:
        reader = reader_class(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    except _READER_ERRORS as error:
        raise ModelFormatError(
            f"{path} cannot be read as GGUF ({error}); it is cut short or damaged: "
            "compare its size and checksum with the source, and copy it again"
        ) from error
    file = GGUFFile(path, metadata, tensors)
    if (file.find("split.count", int) or 1) > 1:
        raise UnsupportedModelError(
            f"{path.name} is one part of a split model; join the parts first "
            "(llama.cpp's gguf-split --merge)"
        )
    return file


def _tensor(tensor: Any) -> GGUFTensor:
    return GGUFTensor(
        name=str(tensor.name),
        shape=tuple(int(size) for size in reversed(tensor.shape)),
        type_name=str(tensor.tensor_type.name),
        packed=tensor.data,
        tensor_type=tensor.tensor_type,
    )


def require_reader() -> None:
    """Raise MissingDependencyError where a GGUF file could not be read.

    To be called before anything is downloaded that would have to be thrown away.
    """
    _reader_class()


def _reader_class() -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a GGUF file needs the gguf package, which {sys.executable} lacks or cannot "
            f"import ({error}): pip install 'gguf>=0.17,<1'"
        ) from error
    return GGUFReader
