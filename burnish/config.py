"""Strict configuration: pydantic sections whose errors are one line that names the key and the mend."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from burnish.errors import InputError

Section = TypeVar("Section", bound=BaseModel)


def build_config(schema: type[Section], values: Mapping[str, Any], *, place: str = "") -> Section:
    """Validates a mapping against a schema.

    Raises InputError for the first thing wrong: an unknown key (with the nearest known one), or a value out of range.
    `place` is put before the key ("adapter" gives "adapter.rank").
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise InputError(_explain(schema, error, place)) from None


def _explain(schema: type[BaseModel], error: ValidationError, place: str) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    key = ".".join([place, *location] if place else location)
    if first["type"] == "extra_forbidden":
        section = _section_at(schema, location[:-1])
        near = difflib.get_close_matches(location[-1], section.model_fields, n=1, cutoff=0.5)
        known = ", ".join(section.model_fields)
        return f"{key}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known keys are {known}")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]} (found {shown})" if key else message


def _section_at(schema: type[BaseModel], location: list[str]) -> type[BaseModel]:
    for part in location:
        if part not in schema.model_fields:
            continue
        annotation = schema.model_fields[part].annotation
        options = [annotation, *get_args(annotation)]
        nested = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        schema = nested[0] if nested else schema
    return schema
