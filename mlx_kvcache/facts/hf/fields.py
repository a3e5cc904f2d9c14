"""Typed reading of a Hugging Face config: a malformed value names its field and is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.checks import is_integer

#: Far more than any model has; each takes memory to describe.
MOST_LAYERS = 100_000


@dataclass(frozen=True)
class Fields:
    """A config's fields, read under their standard names.

    values: the config, as parsed from JSON.
    family: what messages call it.
    names: standard name -> the name that this family gives the field; where only the standard
        name is in the config (transformers renames some so), that is read.
    defaults: what an absent field (not one that is null) stands for, by standard name.
    """

    values: Mapping[str, Any]
    family: str
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def raw(self, name: str) -> Any:
        """The value as it stands; the default where the field is absent, else None."""
        return self.values.get(self.key(name), self.defaults.get(name))

    def given(self, name: str) -> bool:
        """Whether the config itself has the field, and not as null."""
        return self.values.get(self.key(name)) is not None

    def key(self, name: str) -> str:
        """The name under which the config has, or should have, a field."""
        own = self.names.get(name, name)
        return name if own not in self.values and name in self.values else own

    def integer(self, name: str, minimum: int = 1) -> int:
        """A field that must be there. Raises `GeometryError` unless it is an integer >= minimum."""
        value = self.optional_integer(name, minimum)
        if value is None:
            raise self.error(name, None, f"an integer >= {minimum}")
        return value

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """An integer >= minimum, or None where the field is absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if not is_integer(value, minimum):
            raise self.error(name, value, f"an integer >= {minimum}")
        return value

    @property
    def layer_count(self) -> int:
        """How many layers the model has."""
        count = self.integer("num_hidden_layers")
        if count > MOST_LAYERS:
            raise self.error("num_hidden_layers", count, f"an integer from 1 to {MOST_LAYERS}")
        return count

    def flag(self, name: str) -> bool:
        """A boolean; False where the field is absent or null."""
        value = self.raw(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def integers(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """A list of integers >= minimum, which must be there."""
        value = self.raw(name)
        if not isinstance(value, (list, tuple)) or not all(
            is_integer(item, minimum) for item in value
        ):
            raise self.error(name, value, f"a list of integers >= {minimum}")
        return tuple(value)

    def words(self, name: str, count: int | None = None) -> tuple[str, ...] | None:
        """A list of strings, `count` long if that is given; None where it is absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self.error(name, value, "a list of strings")
        if count is not None and len(value) != count:
            raise self.error(
                name,
                value,
                f"one entry for each of the {count} layers, but it has {len(value)} entries",
            )
        return tuple(value)

    def section(self, name: str) -> Fields:
        """The fields of a nested object, which must be there."""
        value = self.raw(name)
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object with fields of its own")
        return Fields(value, f"{self.family}.{self.key(name)}")

    def error(self, name: str, value: object, expected: str) -> GeometryError:
        """The error that says which field of which config holds what, and what it should hold."""
        got = "it is missing" if value is None else f"got {value!r}"
        return GeometryError(
            f"config field {self.key(name)!r} of {self.family} must be {expected}; {got}. "
            "Correct it in the model's config.json"
        )
