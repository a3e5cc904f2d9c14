"""What the run chose: how many positions, in which dtype, growing from where.

Kept apart from the geometry, which is the model's. `validate` is called by every constructor
before anything is indexed or allocated.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

from mlx_kvcache.errors import ConfigError, GeometryError
from mlx_kvcache.facts.checks import is_integer, shortened, whole_number
from mlx_kvcache.facts.geometry import CacheGeometry

#: MLX indexes rows with 32-bit integers, so no cache can hold more positions than this.
MAX_CAPACITY = 2**31 - 1
DEFAULT_INITIAL_CAPACITY = 512
#: Says how many bytes can be had, in place of what the machine says.
LIMIT_VARIABLE = "MLX_KVCACHE_MEMORY"
#: Spare rows of a ring: few, since every decode step of a wrapped ring reads them too.
DEFAULT_SPARE = 64
#: Bytes of one number in each storage dtype, by name.
ITEM_SIZES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
KV_DTYPES = tuple(ITEM_SIZES)


@dataclass(frozen=True)
class CacheConfig:
    """The runtime choices of one cache.

    capacity: the most positions it will hold.
    kv_dtype: storage dtype by name ("float32", "float16", "bfloat16"); None keeps each layer in
        the dtype of its first keys and values.
    initial_capacity: rows that a flat layer starts with (0 is allowed; clamped to the capacity).
    spare: the spare rows of a ring: steps up to this size are written and read in place, and
        a ring that wrapped can be rewound by this many positions.
    max_context: the most positions of a single sequence, where a cache holds many; None: all.
    max_write: the former name of `spare`, deprecated.
    weight_bytes: bytes of the model's weights, where they are known: what limits a decode step
        follows from them. A fact of the model and no choice, so configs are equal without it.
    """

    capacity: int = MAX_CAPACITY
    kv_dtype: str | None = None
    initial_capacity: int = DEFAULT_INITIAL_CAPACITY
    spare: int = DEFAULT_SPARE
    max_context: int | None = None
    max_write: InitVar[int | None] = None
    weight_bytes: int | None = field(default=None, compare=False)

    def __post_init__(self, max_write: int | None) -> None:
        if max_write is None:
            return
        if self.spare != DEFAULT_SPARE:
            raise ConfigError(
                f"spare is {self.spare} and max_write, its former name, {max_write}; give spare"
            )
        warnings.warn(
            "max_write is called spare now", DeprecationWarning, stacklevel=_outside_of_package()
        )
        object.__setattr__(self, "spare", max_write)


def item_size(kv_dtype: str | None) -> int:
    """Bytes of one stored number; 2 for None, as most models run in a dtype of 16 bits.

    Raises `ConfigError` for an unknown dtype.
    """
    if kv_dtype is None:
        return 2
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype must be one of {', '.join(KV_DTYPES)} or None (the model's own), "
            f"got {shortened(kv_dtype)}"
        )
    return ITEM_SIZES[kv_dtype]


def memory_limit() -> int | None:
    """The bytes that every growth may take, by MLX_KVCACHE_MEMORY; None where that says nothing.

    Raises `ConfigError` when it is no number.
    """
    said = os.environ.get(LIMIT_VARIABLE, "").strip()
    limit = whole_number(said)
    if said and limit is None:
        raise ConfigError(f"{LIMIT_VARIABLE} must be a number of bytes, got {shortened(said)}")
    return limit


def validate(geometry: CacheGeometry, config: CacheConfig) -> None:
    """Raise `ConfigError` or `GeometryError` unless the two can make a cache together.

    The message names the field, its value and what to do.
    """
    if not isinstance(geometry, CacheGeometry):
        raise GeometryError(
            f"a CacheGeometry is needed, got {type(geometry).__name__}; "
            "CacheGeometry.from_hf(config) makes one from a Hugging Face config"
        )
    if not isinstance(config, CacheConfig):
        raise ConfigError(f"a CacheConfig is needed, got {type(config).__name__}")
    _require("capacity", config.capacity, 1, "give the most positions that the cache may hold")
    initial = "give the rows to start with (0 allocates at the first write)"
    _require("initial_capacity", config.initial_capacity, 0, initial)
    _require("spare", config.spare, 1, "a ring needs at least one spare row to write to")
    if config.max_context is not None:
        _require("max_context", config.max_context, 1, "leave it out for no limit of its own")
    if config.weight_bytes is not None and not is_integer(config.weight_bytes, 0):
        raise ConfigError(
            f"weight_bytes must be a number of bytes or None, got {config.weight_bytes!r}; "
            "leave it out where it is not known"
        )
    item_size(config.kv_dtype)
    memory_limit()


def _outside_of_package() -> int:
    """How many frames up, from the caller's, the code begins that is not this package's."""
    level, frame = 1, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


def _require(field: str, value: object, minimum: int, remedy: str) -> None:
    if not is_integer(value):
        raise ConfigError(f"{field} must be an integer, got {shortened(value)}; {remedy}")
    if not is_integer(value, minimum, MAX_CAPACITY):
        raise ConfigError(
            f"{field} must be between {minimum} and {MAX_CAPACITY}, got {value}; {remedy}"
        )
