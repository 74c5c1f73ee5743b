"""What a row of JSON, Parquet or CSV may hold, and the words for what it holds instead.

`at` is what an error calls a value, as "messages[2].content"; which file and line is for the caller to say.
"""

import json
from collections.abc import Iterable
from typing import Any

from burnish.errors import InputError

_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def kind(value: Any) -> str:
    """The JSON name of a value's type, as a user would call it."""
    return "an empty list" if isinstance(value, list) and not value else _KINDS.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value in an error: the start of a string, else its kind."""
    if not isinstance(value, str):
        return kind(value)
    return repr(value if len(value) <= 40 else f"{value[:40]}...")


def keys_found(keys: Iterable[Any]) -> str:
    """The part of an error that says what was there instead of a missing key."""
    names = [shown(key) for key in keys]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"keys found: {', '.join(names[:12]) or 'none'}{more}"


def is_number(value: Any) -> bool:
    """Whether it is a number in JSON: true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def not_a_string(value: Any, at: str, what: str = "a string") -> InputError:
    """The error for a value that should be a string."""
    mend = ""
    if is_number(value) and at.isidentifier():  # a column, as CSV files have them
        mend = f"; a template makes it one, as data.columns: {{{at}: '{{{at}}}'}}"
    return InputError(f"{at}: must be {what}, found {kind(value)}{mend}")


def as_text(value: Any, at: str) -> str:
    """A string that a tokenizer can read.

    Raises:
        InputError: another type, or half of a surrogate pair, as JSON can spell it (backslash-u d83d).
    """
    if not isinstance(value, str):
        raise not_a_string(value, at)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise InputError(f"{at}: {half} is half of a character; write the pair or remove it") from error
    return value


def as_answer(value: Any, at: str) -> str:
    """A text to be learned.

    Raises:
        InputError: it is no text (see `as_text`), or there is nothing but white space.
    """
    if not as_text(value, at).strip():
        raise InputError(f"{at} is empty; fill it in or remove the line")
    return value


def as_list(value: Any, at: str, what: str) -> list[Any]:
    """A list, or the list that a string holds as JSON (a cell of a CSV file does).

    Raises:
        InputError: neither of them; `what` says what it should be.
    """
    found = parsed(value, at, what)
    if not isinstance(found, list):
        raise InputError(f"{at}: must be {what}, found {kind(found)}")
    return found


def parsed(value: Any, at: str, what: str) -> Any:
    """A value as it is, or the value that a string holds as JSON.

    Raises:
        InputError: a string that is not JSON; `what` says what should be in it.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}"
        raise InputError(f"{at}: must be {what}, or JSON of one; found a string that is not JSON ({why})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or nesting as deep
        raise InputError(f"{at}: must be {what}, or JSON of one; found JSON that cannot be read ({error})") from error
    without_nulls(found, at)  # checks every string in it
    return found


def without_nulls(value: Any, at: str) -> Any:
    """A copy without the keys whose value is null, which Parquet writes for each key that some other row has.

    Raises:
        InputError: a string in it is not text (see `as_text`).
    """
    if isinstance(value, dict):
        return {as_text(key, at): without_nulls(item, at) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item, at) for item in value]
    return as_text(value, at) if isinstance(value, str) else value
