"""Strict configuration: pydantic sections whose errors are one line that names the key and the mend."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from burnish.errors import InputError

Section = TypeVar("Section", bound=BaseModel)


def build_config(schema: type[Section], values: Mapping[str, Any], *, place: str = "") -> Section:
    """Validates a mapping against a schema.

    Raises InputError for the first thing wrong: an unknown key (with the nearest known one), or a value out of range.
    `place` is put before the key: "adapter" gives "adapter.rank", "a.yaml: " gives "a.yaml: rank".
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise InputError(_explain(schema, error, place)) from None


def _explain(schema: type[BaseModel], error: ValidationError, place: str) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    key = ".".join(location)
    if place:
        key = f"{place}{key}" if place.endswith(" ") else f"{place}.{key}"
    if first["type"] == "extra_forbidden":
        section = _section_at(schema, location[:-1])
        names = _names_under(section)
        near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.6)
        known = ", ".join(section.model_fields)
        return f"{key}: unknown key; " + (f"did you mean {names[near[0]]}?" if near else f"known keys are {known}")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]} (found {shown})" if key else message


def _section_at(schema: type[BaseModel], location: list[str]) -> type[BaseModel]:
    for part in location:
        if part in schema.model_fields:
            schema = _nested(schema, part) or schema
    return schema


def _names_under(schema: type[BaseModel]) -> dict[str, str]:
    """Every key of a section and of the sections in it, by its last word: {"lr": "optimizer.lr"}; outer ones first."""
    names = {name: name for name in schema.model_fields}
    for name in schema.model_fields:
        if inner := _nested(schema, name):
            for word, path in _names_under(inner).items():
                names.setdefault(word, f"{name}.{path}")
    return names


def _nested(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation = schema.model_fields[name].annotation
    options = [annotation, *(get_args(annotation) if get_origin(annotation) is not list else ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
