"""A row -> a record, whatever form the row is in (docs/data.md).

    messages            messages: [{role, content}, ...]
    conversations       conversations: [{from, value}, ...]
    preference          chosen, rejected, and prompt where both do not start with it; `chosen` is what is learned
    prompt_completion   prompt, completion (or response): strings, or lists of messages, or one of each
    alpaca              instruction, output; and input, history: [[question, answer], ...]
    question_answer     question, answer
    text                text
    tokens              input_ids; and labels, a mask, attention_mask

A row that fits several is read as the first of them; its other keys are ignored. All but text and tokens also read
`system` (the system message) and `tools`.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from burnish.data.columns import Column, parse_columns
from burnish.data.config import RowFormat
from burnish.data.forms import LEARNED_KEYS, READERS, DroppedRow, Row
from burnish.data.records import Record
from burnish.data.values import keys_found, kind, shown
from burnish.errors import InputError

__all__ = ["DroppedRow", "check_format", "read_row"]

# Keys that make a form, the first that fits wins.
_NEEDED: tuple[tuple[str, frozenset[str]], ...] = (
    ("messages", frozenset({"messages"})),
    ("conversations", frozenset({"conversations"})),
    ("preference", frozenset({"chosen", "rejected"})),
    ("prompt_completion", frozenset({"prompt", "completion"})),
    ("prompt_completion", frozenset({"prompt", "response"})),
    ("alpaca", frozenset({"instruction", "output"})),
    ("question_answer", frozenset({"question", "answer"})),
    ("text", frozenset({"text"})),
    ("tokens", frozenset({"input_ids"})),
)
_BESIDE = frozenset({"system", "tools"})
# Every key a form reads.
_READS: dict[str, frozenset[str]] = {
    "messages": _BESIDE | {"messages"},
    "conversations": _BESIDE | {"conversations"},
    "preference": _BESIDE | {"prompt", "chosen", "rejected"},
    "prompt_completion": _BESIDE | {"prompt", "completion", "response"},
    "alpaca": _BESIDE | {"instruction", "input", "output", "history"},
    "question_answer": _BESIDE | {"question", "answer"},
    "text": frozenset({"text"}),
    "tokens": frozenset({"input_ids", "attention_mask", *LEARNED_KEYS}),
}


def read_row(row: Mapping[str, Any], index: int, place: str, form: RowFormat) -> Record:
    """The record a row holds.

    Args:
        row: keys and values as JSON has them.
        index: the record's position in the data set.
        place: what errors call the row: "train.jsonl, line 3".
        form: the row's form, and what its columns are called. With `columns`, the row is what they make, and its own
            `tools` and `system`.

    Raises:
        DroppedRow: the chosen and the rejected answer are the same.
        InputError: the row is not of that form; one line that names the place, the key and the mend.
    """
    try:
        if not isinstance(row, Mapping):
            raise InputError(f"expected an object, found {kind(row)}; give messages, or prompt and completion")
        if form.columns:
            name, columns = _plan(form.format, tuple(form.columns.items()))
            row = _mapped(row, columns)
        else:
            name = _form_of(row) if form.format == "auto" else _check_form(row, form.format)
        return READERS[name](row, index, place)
    except DroppedRow:
        raise
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    except RecursionError as error:
        raise InputError(f"{place}: nested too deep to be read; mend or remove the row") from error


def check_format(form: RowFormat) -> None:
    """Whether `columns` make a form, without any row.

    Raises:
        InputError: "data.columns...: ..." where they do not.
    """
    if form.columns:
        _plan(form.format, tuple(form.columns.items()))


@lru_cache(maxsize=256)
def _plan(form: str, columns: tuple[tuple[str, str], ...]) -> tuple[str, tuple[Column, ...]]:
    """The form that columns make, and how each is made."""
    parsed = parse_columns(columns)
    ours = frozenset(column.ours for column in parsed)
    known = frozenset().union(*_READS.values())
    if ours - known:
        wrong = min(ours - known)
        raise InputError(f"data.columns: no form has {shown(wrong)}; ours are {', '.join(sorted(known))}")
    try:
        name = _form_of(dict.fromkeys(ours)) if form == "auto" else _check_form(dict.fromkeys(ours), form)
    except InputError as error:
        raise InputError(f"data.columns: {error} (they are all that is read where they are given)") from error
    if ours - _READS[name]:
        wrong = min(ours - _READS[name])
        raise InputError(f"data.columns.{wrong}: rows of form {name} do not have it; remove it or set data.format")
    return name, parsed


def _mapped(row: Row, columns: Iterable[Column]) -> Row:
    mapped = {key: row[key] for key in _BESIDE if key in row}
    mapped.update((column.ours, column.value(row)) for column in columns)
    return mapped


def _form_of(row: Row) -> str:
    """The form of a row: the first whose keys hold something, else the first whose keys are there."""
    keys = row.keys()
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, keys):
        for name, needed in _NEEDED:
            if needed <= present:
                return name
    for _, needed in _NEEDED:
        if needed & keys:
            raise _missing(row, needed)
    raise InputError(
        f"no 'messages', nor 'prompt' and 'completion', nor another form ({keys_found(row)}); rename the keys, or "
        "name them in data.columns"
    )


def _check_form(row: Row, form: str) -> str:
    """The form's name, where the row has its keys."""
    choices = [needed for name, needed in _NEEDED if name == form]
    if not any(needed <= row.keys() for needed in choices):
        raise _missing(row, choices[0])
    return form


def _missing(row: Row, needed: frozenset[str]) -> InputError:
    names = " and no ".join(repr(key) for key in sorted(needed - row.keys()))
    return InputError(f"no {names} ({keys_found(row)}); rename or add the key, or name yours in data.columns")
