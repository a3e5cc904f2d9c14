"""How many bytes a cache takes at a given length: integers only, from the geometry alone.

Our own figures come from the layouts themselves. mlx-lm's follow its cache classes
(mlx_lm/models/cache.py), whose buffers grow by 256 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlx_kvcache.errors import CapacityError, ConfigError
from mlx_kvcache.facts.config import CacheConfig, validate
from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy
from mlx_kvcache.layout.ring import RingLayout
from mlx_kvcache.layout.runs import grown_rows
from mlx_kvcache.layout.sequence import layer_layout

#: Rows by which mlx-lm's buffers grow.
MLX_LM_STEP = 256
#: Tokens of one prefill step in mlx-lm's generate.
MLX_LM_PREFILL_STEP = 2048


@dataclass(frozen=True)
class Extent:
    """How much is filled, and how much is allocated for it: rows of a layer, or bytes."""

    used: int
    allocated: int

    def times(self, factor: int) -> Extent:
        """This many rows in bytes, given the bytes of a row."""
        return Extent(self.used * factor, self.allocated * factor)


#: Rows of a layer of some policy once the sequence has so many tokens.
RowRule = Callable[[LayerPolicy, int], Extent]


def bytes_per_token(layer: LayerGeometry, size: int) -> int:
    """Bytes of one row of a layer, keys and values, with `size` bytes a number."""
    return layer.elements_per_position * size


def sequence_rows(config: CacheConfig) -> RowRule:
    """The rows of `MLXSequenceCache` with this config, in whatever steps it was filled.

    The rule raises `CapacityError` for more tokens than the capacity.
    """

    def rows(policy: LayerPolicy, tokens: int) -> Extent:
        if tokens > config.capacity:
            raise CapacityError(
                f"{tokens} tokens do not fit into a capacity of {config.capacity}; "
                "ask for fewer, or for a larger capacity"
            )
        if tokens == 0:
            return Extent(0, 0)
        layout = layer_layout(policy, config.capacity, config.spare)
        if not isinstance(layout, RingLayout):
            start = min(config.initial_capacity, config.capacity)
            return Extent(tokens, grown_rows(start, tokens, config.capacity))
        held = min(tokens, layout.size)
        start = min(config.initial_capacity, layout.size)
        return Extent(held, layout.whole(grown_rows(layout.whole(start), held, layout.size)))

    return rows


def growth_bytes(layers: Iterable[tuple[int, int]]) -> int:
    """The bytes to be had for layers to grow, given the bytes that each holds and will hold.

    New rows are allocated beside the old ones. These are freed when they were copied, but MLX may
    have asked for those of all other layers by then, and freed memory comes back in pieces.
    """
    return sum(wanted for held, wanted in layers if wanted > held)


def mlx_lm_rows(policy: LayerPolicy, tokens: int) -> Extent:
    """The rows of mlx-lm's `KVCache` or `RotatingKVCache` after decoding up to `tokens`.

    A rotating cache holds more for a while during prefill: see `rotating_prefill_rows`.
    """
    grown = -(-tokens // MLX_LM_STEP) * MLX_LM_STEP
    if policy.kind == "flat":
        return Extent(tokens, grown)
    return Extent(min(tokens, policy.window), min(grown, policy.window))


def mlx_lm_chunked_rows(policy: LayerPolicy, tokens: int) -> Extent:
    """As `mlx_lm_rows`, for a model whose windows mlx-lm keeps in a `ChunkedKVCache` (llama4).

    Past the chunk it cuts the front off before each token, and then grows by a whole step again.
    """
    flat = mlx_lm_rows(LayerPolicy.flat(), tokens)
    if policy.kind == "flat" or tokens <= policy.window + 1:
        return flat
    return Extent(policy.window + 1, policy.window + MLX_LM_STEP)


def rotating_prefill_rows(window: int, tokens: int, chunk: int = MLX_LM_PREFILL_STEP) -> int:
    """The most rows that mlx-lm's `RotatingKVCache` holds while `tokens` are prefilled in chunks.

    A chunk is appended to what is left of the rows before it: `window` - 1 of them at most.
    """
    whole, rest = divmod(tokens, chunk)
    last = min(whole * chunk, window - 1) + rest if rest else 0
    return max(last, min((whole - 1) * chunk, window - 1) + chunk if whole else 0)


@dataclass(frozen=True)
class Footprint:
    """The bytes of every cache layer at `tokens` tokens."""

    tokens: int
    layers: tuple[Extent, ...]

    @property
    def total(self) -> Extent:
        """All layers together."""
        return Extent(
            sum(layer.used for layer in self.layers),
            sum(layer.allocated for layer in self.layers),
        )


def footprint(geometry: CacheGeometry, tokens: int, size: int, rows: RowRule) -> Footprint:
    """The bytes that a cache of this geometry takes, by the row rule of its kind.

    `size` is the bytes of one number. Raises what the rule raises, and `ConfigError` for a
    negative number of tokens.
    """
    if tokens < 0:
        raise ConfigError(f"a cache cannot hold {tokens} tokens; give 0 or more")
    return Footprint(
        tokens,
        tuple(
            rows(layer.policy, tokens).times(bytes_per_token(layer, size))
            for layer in geometry.layers
        ),
    )


def sequence_footprint(
    geometry: CacheGeometry, tokens: int, config: CacheConfig, size: int
) -> Footprint:
    """The bytes of an `MLXSequenceCache` of batch 1 at `tokens` tokens, with `size` bytes a number.

    Raises `ConfigError` or `GeometryError` where the cache itself would, and `CapacityError`.
    """
    validate(geometry, config)
    return footprint(geometry, tokens, size, sequence_rows(config))
