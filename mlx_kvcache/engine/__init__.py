"""Many conversations with one model at once: sessions, requests, continuous batching."""

from mlx_kvcache.engine.engine import Engine
from mlx_kvcache.engine.metrics import Metrics
from mlx_kvcache.engine.requests import Event, Request, Session

__all__ = ["Engine", "Event", "Metrics", "Request", "Session"]
