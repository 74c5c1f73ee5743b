"""The rows of a text file: JSON lines, a JSON list, CSV and TSV.

Each reader takes a binary stream of UTF-8 without a byte-order mark, and the name that errors call it. A row that
cannot be parsed is an InputError in its place, for the caller to raise, or to drop and count.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import IO, Any, NamedTuple

from burnish.data.values import kind, shown
from burnish.errors import InputError

Row = Mapping[str, Any] | InputError


class Chunk(NamedTuple):
    """Rows that are read together, or passed over unread.

    Attributes:
        size: how many rows they are.
        read: parses them: the place of each, as "train.jsonl, line 3", and the row.
    """

    size: int
    read: Callable[[], Iterable[tuple[str, Row]]]


def json_lines(lines: Iterable[bytes], name: str) -> Iterator[Chunk]:
    """A JSON object a line; blank lines are no rows. Lines end at newlines alone: U+2028 is part of a string."""
    for number, raw in enumerate(lines, start=1):
        if raw.strip():
            yield Chunk(1, partial(_json_line, raw, name, number))


def json_file(stream: IO[bytes], name: str) -> Iterator[Chunk]:
    """A list of objects, an object with one list of objects in it, one object, or JSON lines under another name.

    Raises:
        InputError: the text is none of these, from where on no row can be told from the next.
    """
    head: list[bytes] = []
    filled: list[bytes] = []  # two lines that are not blank tell JSON lines from the rest
    while len(filled) < 2 and (raw := stream.readline()):
        head.append(raw)
        if raw.strip():
            filled.append(raw.strip())
    if len(filled) == 2 and filled[0].startswith(b"{") and filled[0].endswith(b"}") and filled[1].startswith(b"{"):
        yield from json_lines(chain(head, stream), name)
    elif filled:
        yield from _json_document(_decoded(b"".join(head) + stream.read(), name), name)


def csv_rows(stream: IO[bytes], name: str, delimiter: str) -> Iterator[Chunk]:
    """Rows under the names of the first line, all values strings. A row is called by the line it begins on.

    Raises:
        InputError: the header is not usable, or a quote is never closed.
    """
    csv.field_size_limit(2**31 - 1)  # the module's own limit is 128 KiB a cell
    # What is not UTF-8 becomes lone surrogates, so that one bad row does not end the file.
    lines = (raw.decode("utf-8", "surrogateescape") for raw in stream)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        place = f"{name}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise InputError(f"{place}: a quote that opens here is never closed; close it, or double it") from error
            if header is None:
                raise InputError(f"{place}: not a valid header ({error}); mend the line") from error
            problem = InputError(f"{place}: not valid CSV ({error}); double the quotes inside a quoted cell")
            yield Chunk(1, partial(_one, place, problem))
            continue
        if cells is None:
            return
        if not cells:
            continue  # a blank line
        if header is None:
            header = _header(cells, place)
        else:
            yield Chunk(1, partial(_csv_row, header, cells, place))


# JSON


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its keys and values; Python alone would keep the last of two values and say nothing."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice")
    return value


_STRICT = json.JSONDecoder(object_pairs_hook=_once)
_LENIENT = json.JSONDecoder(parse_int=str)  # finds the end of a value that _STRICT refuses
_SPACE = re.compile(r"[ \t\r\n]*")


def _json_line(raw: bytes, name: str, number: int) -> Iterable[tuple[str, Row]]:
    place = f"{name}, line {number}"
    try:
        return _one(place, _STRICT.decode(raw.decode("utf-8").strip()))
    except UnicodeDecodeError:
        problem = "not UTF-8 text; save the file as UTF-8"
    except json.JSONDecodeError as error:
        problem = f"not valid JSON ({error.msg} at column {error.colno}); write one JSON object a line"
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits, or nesting as deep
        problem = _unreadable(error)
    return _one(place, InputError(f"{place}: {problem}"))


def _one(place: str, value: Any) -> Iterable[tuple[str, Row]]:
    """A parsed value as the one row of its part."""
    if not isinstance(value, dict | InputError):
        value = InputError(f"{place}: expected a JSON object, found {kind(value)}; write an object of keys and values")
    return ((place, value),)


def _unreadable(error: Exception) -> str:
    return f"JSON that cannot be read ({error}); mend or remove it"


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name}, line {number}: not UTF-8 text; save the file as UTF-8") from error


def _json_document(text: str, name: str) -> Iterator[Chunk]:
    try:
        start = _after_space(text, 0)
        if text[start] == "[":
            yield from _list_items(text, start + 1, name)
            return
        values = _rows_inside(_STRICT.decode(text), name)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        where = f"{name}, line {error.lineno}"
        mend = "write a list of objects, or one object a line"
        raise InputError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); {mend}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: {_unreadable(error)}") from error
    for number, value in enumerate(values, start=1):
        yield Chunk(1, partial(_one, f"{name}, item {number}", value))


def _list_items(text: str, position: int, name: str) -> Iterator[Chunk]:
    """The values of a list that opens before `position`, one by one, so that an error can say which it is in.

    Raises:
        json.JSONDecodeError: the list, or a value in it, does not end as JSON must.
    """
    position, number = _after_space(text, position), 0
    closed = text.startswith("]", position)
    while not closed:
        number += 1
        place = f"{name}, item {number}"
        value, position = _list_item(text, position, place)
        yield Chunk(1, partial(_one, place, value))
        position = _after_space(text, position)
        closed = text.startswith("]", position)
        if not closed:
            if not text.startswith(",", position):
                raise json.JSONDecodeError(f"Expecting ',' or ']' after item {number}", text, position)
            position = _after_space(text, position + 1)
    if _after_space(text, position + 1) < len(text):
        raise json.JSONDecodeError("Extra data after the list", text, _after_space(text, position + 1))


def _list_item(text: str, position: int, place: str) -> tuple[Any, int]:
    """The value at `position`, or what is wrong with it, and the position after it."""
    try:
        return _STRICT.raw_decode(text, position)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return InputError(f"{place}: {_unreadable(error)}"), _LENIENT.raw_decode(text, position)[1]
    except RecursionError as error:
        raise InputError(f"{place}: {_unreadable(error)}") from error


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


_ROW_KEYS = {"messages", "conversations", "chosen", "prompt", "instruction", "question", "text", "input_ids"}


def _rows_inside(value: Any, name: str) -> list[Any]:
    """The one list of objects in an object, as {"data": [...]}; else the object is a row, as a conversation is.

    A list of turns is known by their keys, and does not count; nor does anything in an object that is a row itself.
    """
    if isinstance(value, dict) and value.keys() & _ROW_KEYS:
        return [value]
    lists = {key: item for key, item in value.items() if _is_rows(item)} if isinstance(value, dict) else {}
    if not lists or any(turn.keys() & {"role", "from"} for item in lists.values() for turn in item):
        return [value]
    if len(lists) > 1:
        names = ", ".join(shown(key) for key in lists)
        raise InputError(f"{name} holds several lists of objects ({names}); write each to a file of its own")
    return next(iter(lists.values()))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


# CSV


def _header(cells: list[str], place: str) -> list[str]:
    for number, cell in enumerate(cells, start=1):
        if not cell.strip():
            raise InputError(f"{place}: column {number} has no name; name it or remove the column")
        if cell in cells[: number - 1]:
            raise InputError(f"{place}: two columns are called {shown(cell)}; rename or remove one")
    if not _is_utf8(cells):
        raise InputError(f"{place}: not UTF-8 text; save the file as UTF-8")
    return cells


def _csv_row(header: list[str], cells: list[str], place: str) -> Iterable[tuple[str, Row]]:
    if len(cells) != len(header):
        found = f"{len(cells)} cells under {len(header)} column names"
        return _one(place, InputError(f"{place}: {found}; quote cells that hold a delimiter, or mend the line"))
    if not _is_utf8(cells):
        return _one(place, InputError(f"{place}: not UTF-8 text; save the file as UTF-8"))
    return _one(place, dict(zip(header, cells, strict=True)))


def _is_utf8(cells: list[str]) -> bool:
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
