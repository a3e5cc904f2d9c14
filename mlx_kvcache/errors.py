"""Typed errors: one base class, each also the built-in that a Python user expects.

Every message says what was asked, what holds, and what to do about it. A call that raises
one of these has changed nothing.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class GeometryError(KVCacheError, ValueError):
    """A model description that cannot be turned into a cache geometry."""


class UnknownLayerTypeError(GeometryError):
    """A layer type, or a model family, whose caching rule is not known."""


class ConfigError(KVCacheError, ValueError):
    """A runtime choice (capacity, window, dtype, ...) that does not fit."""


class CapacityError(KVCacheError, ValueError):
    """A step or a reservation that would not fit into the capacity."""


class MemoryLimitError(KVCacheError, MemoryError):
    """Rows that take more memory than can be had.

    needed, available: bytes. fits: the positions that would fit.
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0, fits: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.fits = fits


class PositionError(KVCacheError, ValueError):
    """A step that does not continue the sequence where it stands."""


class RewindError(KVCacheError, ValueError):
    """A rewind to a position whose window is no longer held.

    nearest: the highest position below it that can be reached.
    """

    def __init__(self, message: str, nearest: int = 0) -> None:
        super().__init__(message)
        self.nearest = nearest


class SnapshotError(KVCacheError, ValueError):
    """A snapshot of a cache of another kind, geometry or config."""


class TranscriptError(KVCacheError, ValueError):
    """A file that holds no conversation that this package saved with this model, or only a part."""


class _LookupError(KVCacheError, KeyError):
    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which is meant for a bare key.
        return Exception.__str__(self)


class UnknownSequenceError(_LookupError):
    """A sequence id that was never given out, or whose sequence was removed."""


class StepError(KVCacheError, RuntimeError):
    """A step over several sequences that is malformed, not declared, or not finished."""


class UpdateShapeError(KVCacheError, ValueError):
    """Keys or values whose batch, heads, rows or head dim do not fit the layer."""


class UpdateDtypeError(KVCacheError, TypeError):
    """Keys or values that are not floating-point arrays."""


class AttentionError(KVCacheError, ValueError):
    """A mask, scale or other option of an attention call that does not fit its queries."""


class LayerIndexError(KVCacheError, IndexError):
    """A cache layer index outside the geometry."""


class ModelNotFoundError(KVCacheError, FileNotFoundError):
    """A model name or path that leads to no model that can be reached."""


class ModelFormatError(KVCacheError, ValueError):
    """A model file that is damaged or not of the expected form."""


class RoomError(KVCacheError, OSError):
    """A disk without room for what would have to be written."""


class ModelInUseError(KVCacheError, RuntimeError):
    """A model that cannot be deleted while another process makes it."""


class NonFiniteError(KVCacheError, ArithmeticError):
    """A model whose values or logits for one request are not finite numbers."""


class UnsupportedModelError(KVCacheError, ValueError):
    """A model whose architecture this package (or mlx-lm) cannot run."""


class TracingError(KVCacheError, RuntimeError):
    """A cache within `mx.compile`, whose replays would not tell it of their steps."""


class MissingDependencyError(KVCacheError, ImportError):
    """A feature whose optional package is not installed."""


class MetadataError(GeometryError):
    """Published cache metadata that is missing a field, malformed, or of an unknown version."""


class RegistrationError(KVCacheError, ValueError):
    """A cache builder that a factory does not take: not callable, badly named, or a duplicate."""


class CacheKindError(_LookupError):
    """A (backend, kind) for which no builder is registered."""


class CacheKeyError(_LookupError):
    """A registry key under which no cache is installed."""


class BuilderError(KVCacheError, RuntimeError):
    """A cache builder that cannot be loaded, or whose answer is not a cache."""


class FaceError(KVCacheError, TypeError):
    """An object that lacks the face (the set of calls) that was asked for."""


class SessionError(KVCacheError, RuntimeError):
    """A session used before it is opened, after it is closed, or entered twice; a busy engine."""


class NoActiveCacheError(KVCacheError, RuntimeError):
    """An operation that needs an active cache where none is active."""


class KernelUnavailableError(KVCacheError, RuntimeError):
    """A Metal kernel that was asked for where Metal, or the kernel's source, is missing."""
