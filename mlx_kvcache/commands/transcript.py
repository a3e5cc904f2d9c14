"""A conversation as a file: one JSON object a line, one line a message."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_kvcache.chat.conversation import Conversation
from mlx_kvcache.errors import ConfigError


def messages(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """The messages: `role`, `content`, and of an answer `token_ids` and `finish_reason`.

    A turn whose answer was undone has no message of the assistant.
    """
    if conversation.options.system is not None:
        yield {"role": "system", "content": conversation.options.system}
    for turn in conversation.turns:
        yield {"role": "user", "content": turn.user}
        if turn.answer:
            yield {
                "role": "assistant",
                "content": conversation.answer_text(turn),
                "finish_reason": turn.end,
                "token_ids": list(turn.answer),
            }


def save_transcript(conversation: Conversation, path: Path, overwrite: bool) -> int:
    """Write the messages to `path`, whole or not at all; answers how many.

    Raises `ConfigError` for a file that is there already, unless it is to be overwritten, and
    OSError where it cannot be written.
    """
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; add --force to overwrite it")
    lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages(conversation)]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(lines)
