"""`data.columns`: our column -> theirs, or a text with theirs in it.

{prompt: question, completion: answer}
{prompt: "Q: {question}\\nA:", completion: " {answer}"}     {{ and }} are braces themselves
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from burnish.data.values import is_number, keys_found, kind, shown
from burnish.errors import InputError


@dataclass(frozen=True)
class Column:
    """How one of our columns is made: of theirs called `name`, or of (text, their column or None) pieces."""

    ours: str
    name: str = ""
    pieces: tuple[tuple[str, str | None], ...] = ()

    def value(self, row: Mapping[str, Any]) -> Any:
        """What the column holds for a row.

        Raises:
            InputError: the row lacks a column, or holds no string or number where a text needs one.
        """
        if not self.pieces:
            return self._theirs(row, self.name)
        return "".join(text + ("" if name is None else self._written(row, name)) for text, name in self.pieces)

    def _theirs(self, row: Mapping[str, Any], name: str) -> Any:
        if name not in row:
            raise InputError(
                f"no {shown(name)}, which data.columns.{self.ours} names ({keys_found(row)}); name another"
            )
        return row[name]

    def _written(self, row: Mapping[str, Any], name: str) -> str:
        value = self._theirs(row, name)
        if isinstance(value, str):
            return value
        found = kind(value)
        if is_number(value):
            try:
                return json.dumps(value, allow_nan=False)
            except ValueError:  # not a number, infinite, or an integer of thousands of digits
                found = "a number that JSON cannot spell"
        where = f"data.columns.{self.ours} puts it in a text"
        raise InputError(f"{shown(name)}: must be a string or a number, as {where}, found {found}")


def parse_columns(columns: Iterable[tuple[str, str]]) -> tuple[Column, ...]:
    """The columns of a recipe.

    Raises:
        InputError: a text whose braces do not hold the name of a column.
    """
    return tuple(_pieces(ours, theirs) if "{" in theirs else Column(ours, theirs) for ours, theirs in columns)


def _pieces(ours: str, text: str) -> Column:
    mend = "write {column}, and {{ or }} for a brace itself"
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise InputError(f"data.columns.{ours}: {error}; {mend}") from error
    if any(name is not None and (not name or spec or conversion) for _, name, spec, conversion in parsed):
        raise InputError(f"data.columns.{ours}: braces hold the name of a column and nothing else; {mend}")
    return Column(ours, pieces=tuple((literal, name) for literal, name, _, _ in parsed))
