"""The options of `mlx-kvcache op`, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import KV_DTYPES, MAX_CAPACITY

KV_CACHE_FORM = "capacity,layers,heads,dim[,dtype]"
DEFAULT_STEPS = "5,1,1"
#: What float32 attention may be off, for values of the size of 1.
DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class KVCacheText:
    """The cache of --kv-cache: `capacity,layers,heads,dim[,dtype]`."""

    capacity: int
    layers: int
    heads: int
    dim: int
    dtype: str | None

    @classmethod
    def parse(cls, text: str) -> KVCacheText:
        """Raises `ConfigError`, naming the field, for anything of another form."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) not in (4, 5):
            raise ConfigError(f"--kv-cache is {KV_CACHE_FORM}, got {text!r}")
        dtype = parts[4] if len(parts) == 5 else None
        if dtype is not None and dtype not in KV_DTYPES:
            raise ConfigError(f"--kv-cache: dtype is one of {', '.join(KV_DTYPES)}, got {dtype!r}")
        names = ("capacity", "layers", "heads", "dim")
        numbers = [_whole("--kv-cache", *pair) for pair in zip(names, parts[:4], strict=True)]
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], dtype)


def parse_steps(text: str) -> tuple[int, ...]:
    """The tokens of each step of "5,1,1". Raises `ConfigError`."""
    return tuple(_whole("--steps", "a step", part) for part in text.split(","))


def _whole(flag: str, name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_CAPACITY:
        raise ConfigError(
            f"{flag}: {name} must be an integer from 1 to {MAX_CAPACITY}, got {text.strip()!r}"
        )
    return number


@dataclass(frozen=True)
class Drawing:
    """What random tensors are to look like, beside the cache. None stands for a default."""

    query_heads: int | None
    value_dim: int | None
    batch: int | None
    sinks: bool
    seed: int | None

    def refuse_with(self, path: Path) -> None:
        """Raise `ConfigError` when anything is set, since the tensors come from a file."""
        for name, value in vars(self).items():
            if value is not None and value is not False:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for random tensors, but {path} gives them; "
                    "leave one of them out"
                )
