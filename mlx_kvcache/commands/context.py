"""The context length that a model's config states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What the families call it, the usual name first.
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "model_max_length",
    "seq_length",
    "n_ctx",
)
#: Where multimodal configs keep the fields of their text model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def position_limit(config: Mapping[str, Any]) -> int | None:
    """The most positions that the model was made for; None where its config does not say.

    A text part inside the config goes before the config's own fields.
    """
    parts = [config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)]
    for part in (*parts, config):
        for name in _NAMES:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
