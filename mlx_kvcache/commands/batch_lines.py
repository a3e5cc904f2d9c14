"""One line of `batch` that is JSON: a string, an object of ours, or a line of OpenAI's batches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from mlx_kvcache.chat.text import Message
from mlx_kvcache.commands.batch_fields import check_names, check_text, option_names
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.json_text import read_json

#: What one line says: one prompt, or the messages of a conversation.
Content = str | tuple[Message, ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
#: The roles of a system prompt: where messages have one, there is no place for another.
SYSTEM_ROLES = ("system", "developer")

_CONTENT = ("prompt", "messages")
_OPENAI = ("custom_id", "method", "url", "body")
#: Whether a path takes a plain text, outside of the chat template.
_PATHS = {"/v1/chat/completions": False, "/v1/completions": True}
#: Fields of a request body with the one value that asks for what is done anyway.
_AS_IT_IS: Mapping[str, object] = {"n": 1, "stream": False}


def read_fields(line: str) -> dict[str, Any]:
    """The fields of a line, their names checked; a string is a prompt. Raises `ConfigError`."""
    try:
        content = read_json(
            line, object_pairs_hook=_fields_once, parse_float=_finite, parse_constant=_finite
        )
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON ({error.msg} at column {error.colno}); repair it, or use --text for "
            "plain text"
        ) from error
    except ValueError as error:
        # An integer of thousands of digits, or thousands of brackets.
        raise ConfigError(f"not valid JSON ({error}); repair it") from error
    fields = {"prompt": content} if isinstance(content, str) else content
    if "body" in fields or "custom_id" in fields:
        return _from_openai(fields)
    check_names(fields, (*_CONTENT, "id", *option_names()))
    return fields


def take_content(fields: dict[str, Any]) -> Content:
    """Take "prompt" or "messages" out of the fields, and check it. Raises `ConfigError`."""
    if "messages" not in fields:
        return _prompt(fields)
    if "prompt" in fields:
        raise ConfigError('there are "prompt" and "messages"; give one of them')
    messages = fields.pop("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            '"messages" must be a list of objects with "role" and "content", and not empty'
        )
    said = tuple(_message(number, message) for number, message in enumerate(messages, 1))
    if said[-1]["role"] == "assistant":
        raise ConfigError("the last message is the assistant's; end with one to be answered")
    if not said[-1]["content"].strip():
        raise ConfigError("the last message is blank; say something to be answered")
    return said


def _prompt(fields: dict[str, Any]) -> str:
    text = fields.pop("prompt", None)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'"prompt" must be a string that is not blank, got {text!r}')
    check_text(text, "the prompt")
    return text


def _message(number: int, message: object) -> Message:
    name = f"message {number}"
    if not isinstance(message, dict):
        raise ConfigError(f'{name} must be an object with "role" and "content", got {message!r}')
    check_names(message, ("role", "content"))
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ConfigError(f'"role" of {name} must be one of {", ".join(ROLES)}, got {role!r}')
    text = _joined(content) if isinstance(content, list) else content
    if not isinstance(text, str):
        raise ConfigError(
            f'"content" of {name} must be a string, or a list of parts of type "text", got '
            f"{content!r}"
        )
    check_text(text, name)
    return {"role": role, "content": text}


def _joined(parts: list[Any]) -> str | None:
    """The text of OpenAI's content parts; None where one of them is anything but text."""
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if texts and len(texts) == len(parts) else None


def _from_openai(line: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line of OpenAI's batch files, under our names."""
    check_names(line, _OPENAI)
    body, path = line.get("body"), line.get("url")
    if not isinstance(body, dict):
        raise ConfigError(f'"body" must be an object, the request itself, got {body!r}')
    if path not in _PATHS or line.get("method", "POST") != "POST":
        raise ConfigError(
            f"only POST requests to {' and '.join(_PATHS)} can be answered, got "
            f"{line.get('method')!r} to {path!r}"
        )
    check_names(body, (*_CONTENT, *_AS_IT_IS, *option_names()))
    # There, null asks for the default.
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in _AS_IT_IS.items():
        if fields.pop(name, value) != value:
            raise ConfigError(f"{name!r} must be {json.dumps(value)}, as a line has one answer")
    if _PATHS[path]:
        fields.setdefault("raw", True)
    return {**fields, "id": line.get("custom_id")}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ConfigError(f"{text} is no number that JSON has; repair it")
    return number


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice!r} is given twice; give it once")
    return fields
