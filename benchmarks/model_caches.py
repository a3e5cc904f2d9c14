"""The two caches of a loaded model, and what is held and read in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as make_their_cache

import mlx_kvcache
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY
from mlx_kvcache.integrations.mlx_lm import PromptCache
from mlx_kvcache.integrations.tracing import is_kv_cache, leaves

#: Makes a fresh, empty cache list.
CacheMaker = Callable[[], list[Any]]


class NarrowedRotatingKVCache(RotatingKVCache):  # type: ignore[misc]
    """mlx-lm's rotating cache under a window other than the one that the model asks for.

    A model passes its config's window to `make_mask`; with another cache, a prompt chunk would
    be masked by that one. Nothing else differs from mlx-lm's class.
    """

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """The mask for its own window, whatever the model names."""
        del window_size
        return super().make_mask(N, window_size=self.max_size, return_array=return_array)


class WideKVCache(KVCache):  # type: ignore[misc]
    """mlx-lm's cache that keeps everything, and lets everything be seen."""

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """The mask without a window, whatever the model names."""
        del window_size
        return super().make_mask(N, return_array=return_array, window_size=None)


@dataclass(frozen=True)
class Makers:
    """Makes either cache of one model, with the same windows."""

    model: Any
    windows: Sequence[int] | None = None
    capacity: int | None = None
    initial_capacity: int = DEFAULT_INITIAL_CAPACITY

    def ours(self) -> PromptCache:
        """Our drop-in. Raises the package's typed errors."""
        return mlx_kvcache.make_prompt_cache(
            self.model,
            self.capacity,
            initial_capacity=self.initial_capacity,
            windows=self.windows,
        )

    def theirs(self) -> list[Any]:
        """mlx-lm's own, with the windows replaced where they were given.

        Their number is checked by `ours`, which is made first.
        """
        entries: list[Any] = make_their_cache(self.model)
        if self.windows is None:
            return entries
        following = iter(self.ours().sequence.geometry.windows)
        return [_with_windows(entry, following) for entry in entries]


def _with_windows(entry: Any, windows: Iterator[int]) -> Any:
    if isinstance(entry, CacheList):
        return CacheList(*(_with_windows(child, windows) for child in entry.caches))
    if not is_kv_cache(entry):
        return entry
    window = next(windows)
    if isinstance(entry, ChunkedKVCache):
        raise ConfigError(
            "windows cannot be overridden for chunked attention: the model builds the mask of "
            "mlx-lm's ChunkedKVCache from its own config; leave the windows out"
        )
    return NarrowedRotatingKVCache(window) if window else WideKVCache()


@dataclass(frozen=True)
class Held:
    """Bytes of keys and values: allocated, and those of them that hold a remembered position."""

    allocated: int
    used: int


def held(cache: list[Any]) -> Held:
    """What either kind of cache holds; the state of recurrent layers is left out."""
    if isinstance(cache, PromptCache):
        return Held(cache.sequence.nbytes, cache.sequence.nbytes_used)
    allocated = used = 0
    for layer in _written_layers(cache):
        rows = layer.keys.shape[2]
        allocated += layer.nbytes
        used += layer.nbytes // rows * min(layer.offset, rows)
    return Held(allocated, used)


def _written_layers(cache: list[Any]) -> Iterator[Any]:
    for entry in cache:
        for leaf in leaves(entry):
            is_kv = is_kv_cache(leaf) or isinstance(leaf, NarrowedRotatingKVCache)
            if is_kv and leaf.keys is not None:
                yield leaf


def bytes_seen(cache: PromptCache, length: int) -> int:
    """Bytes of the keys and values that one token sees when `length` positions are held.

    All rows of a flat layer, those of the window of a ring: what attention must read, whatever a
    cache hands it. `cache` is ours, and has been written.
    """
    return sum(
        layer.nbytes // layer.rows * min(length, layer.geometry.policy.window or length)
        for layer in cache.sequence.layers
    )


def weight_bytes_read(model: Any) -> int | None:
    """Bytes of the weights that one decoded token reads; None when that depends on the token.

    An embedding table that is only looked up (the model has an lm_head) counts nothing; a mixture
    of experts reads a part that the router picks, so no figure is given for it.
    """
    parameters: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    paths = [path for path, _ in parameters]
    if any("experts" in path or "switch_mlp" in path for path in paths):
        return None
    untied = any("lm_head" in path for path in paths)
    read = [value for path, value in parameters if not (untied and "embed_tokens" in path)]
    return sum(int(value.nbytes) for value in read)
