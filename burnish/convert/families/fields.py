"""Reads the fields of a `config.json`: each is checked where it is read, and errors name the file and the field."""

import math
from collections.abc import Mapping
from typing import Any

from burnish.errors import InputError
from burnish.models.config import ModelConfig


class Fields:
    """The fields of one section. A field that is null counts as missing.

    place: what the errors call the section ("out/config.json").
    """

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        value = self.values.get(key)
        return default if value is None else value

    def error(self, message: str) -> InputError:
        """An error of this section."""
        return InputError(f"{self.place}: {message}")

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of `least` or more; where the field is missing, the default or an InputError."""
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing; the file is incomplete")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(f"{key} is {value!r}; it must be a whole number of {least} or more")
        return value

    def layer_set(self, key: str, layers: int) -> set[int]:
        """Numbers of layers, from 0; none where the field is missing."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < layers for item in value):
            raise self.error(f"{key} is {value!r}; a list of layer numbers from 0 to {layers - 1} is needed")
        return set(value)

    def section(self, key: str) -> Mapping[str, Any]:
        """The fields under a key; none where it is missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {value!r}; a set of numbers by name is needed")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"{key} is {value!r}; it must be a number above 0")
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """A number above 0, or None where the field is missing."""
        return None if self.get(key) is None else self.number(key, 1.0)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; it must be true or false")
        return value

    def one_a_layer(self, key: str, length: int, kind: type | tuple[type, ...]) -> list[Any] | None:
        """So many values of one kind, or None where the field is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, kind) for item in value):
            raise self.error(f"{key} is {value!r}; a list of {length} values is needed")
        return value

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """What one of a few words stands for."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(f"{key} {value!r} is not known; known are {', '.join(choices)}")
        return choices[value]

    def neutral(self, key: str, value: Any, why: str) -> None:
        """Refuses a field that would change what the model computes unless it is missing or says this."""
        if self.get(key, value) != value:
            raise self.error(f"{key} is {self.values[key]!r}; {why}")

    def config(self, **values: Any) -> ModelConfig:
        """A `ModelConfig` whose errors name this section."""
        return placed_config(self.place, **values)


def placed_config(place: str, **values: Any) -> ModelConfig:
    """A `ModelConfig` whose errors name the file that its values come from."""
    try:
        return ModelConfig(**values)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
