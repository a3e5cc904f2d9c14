"""The options of `mlx-kvcache op`, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from mlx_kvcache.commands.flags import check_integer, flag
from mlx_kvcache.commands.options import parse_windows
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import DEFAULT_SPARE, KV_DTYPES, MAX_CAPACITY

KV_CACHE_FORM = "capacity,layers,heads,dim[,dtype]"
DEFAULT_STEPS = "5,1,1"
#: What float32 attention may be off, for values of the size of 1.
DEFAULT_TOLERANCE = 1e-4
#: What describes random tensors.
_DRAWN = ("query_heads", "value_dim", "batch", "sinks", "seed")


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


@dataclass(frozen=True)
class OpOptions:
    """What to run the op on. None stands for a default.

    Raises `ConfigError`, naming the flag and its value, for what cannot be.
    """

    kv_cache: Annotated[
        str, typer.Option(metavar=KV_CACHE_FORM, help="The cache to run on.", show_default=False)
    ]
    windows: Annotated[
        str, typer.Option(metavar="N,...", help="One for all layers, or one each; 0 = flat.")
    ] = "0"
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="T,...",
            help=f"Tokens of each step. [default: {DEFAULT_STEPS}; with --tensors one step]",
            show_default=False,
        ),
    ] = None
    spare: Annotated[int, flag("Spare rows of a ring.")] = DEFAULT_SPARE
    query_heads: Annotated[int | None, flag("A multiple of the heads.", default="the heads")] = None
    value_dim: Annotated[int | None, flag("Width of the values.", default="dim")] = None
    batch: Annotated[int | None, flag("Sequences that advance together.", default="1")] = None
    sinks: Annotated[bool, flag("Give each head an attention sink.", "--sinks")] = False
    softcap: Annotated[float | None, flag("Cap the scores.")] = None
    scale: Annotated[float | None, flag("Scale of the scores.", default="1 / sqrt(dim)")] = None
    seed: Annotated[int | None, flag("Of the random tensors.", default="0")] = None
    tensors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="queries, keys and values [B, H, N, D], or [L, B, H, N, D]; sinks [Hq].",
        ),
    ] = None
    tolerance: Annotated[
        float, flag("Largest error allowed; times the largest value if that is above 1.")
    ] = DEFAULT_TOLERANCE

    def __post_init__(self) -> None:
        _ = self.cache, self.step_tokens, self.cache_windows
        check_integer("--spare", self.spare, 1)
        check_integer("--query-heads", self.query_heads, 1)
        check_integer("--value-dim", self.value_dim, 1)
        check_integer("--batch", self.batch, 1)
        check_integer("--seed", self.seed, 0)
        if not 0 < self.tolerance < math.inf:
            raise ConfigError(f"--tolerance must be a positive number, got {self.tolerance}")
        for name in _DRAWN if self.tensors is not None else ():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for random tensors, but {self.tensors} gives "
                    "them; leave one of them out"
                )

    @cached_property
    def cache(self) -> KVCacheText:
        """What --kv-cache says."""
        return KVCacheText.parse(self.kv_cache)

    @cached_property
    def cache_windows(self) -> tuple[int, ...]:
        """The windows as numbers."""
        return parse_windows(self.windows)

    @cached_property
    def step_tokens(self) -> tuple[int, ...] | None:
        """The tokens of each step; None for one step over the given tensors."""
        if self.steps is None and self.tensors is not None:
            return None
        steps = DEFAULT_STEPS if self.steps is None else self.steps
        return tuple(_whole("--steps", "a step", part) for part in steps.split(","))


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
