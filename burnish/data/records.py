"""JSON lines -> records: conversations, or a prompt and its completion.

A line is a JSON object in one of two forms, recognised line by line; other keys are ignored:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2?", "completion": "4"}          # strings, or lists of messages, or one of each

Every assistant turn of `messages` is trained on; of `prompt` and `completion`, the completion alone. A line
with both forms is read as `messages`. A `tools` list in a conversation goes to the chat template.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.errors import InputError

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
}


@dataclass(frozen=True)
class ChatRecord:
    """A conversation. Assistant turns from message `first_trained` on are what is learned, unless weights say other.

    Attributes:
        index: position in the data set, from 0; becomes `example_ids`.
        place: what an error calls it: "train.jsonl, line 3".
        messages: `{"role": ..., "content": ...}` and whatever else a template reads; no training flags.
        first_trained: messages before it are a prompt that is given, whatever their role.
        tools: JSON schemas of functions, for the template.
        weights: what the row says of each message: None nothing, 0 not to be learned, else its loss weight; empty where
            it says nothing of any.
    """

    index: int
    place: str
    messages: tuple[Message, ...]
    first_trained: int = 0
    tools: tuple[Any, ...] | None = None
    weights: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class TextRecord:
    """A prompt and a completion without roles: raw text to a base model, two turns to a chat model.

    Where `raw`, it is text to be learned whole whatever the model: there is no prompt, and no template is used.
    """

    index: int
    place: str
    prompt: str
    completion: str
    raw: bool = False

    def as_chat(self) -> ChatRecord:
        """The same as a user turn and an assistant turn."""
        turns = ({"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.completion})
        return ChatRecord(self.index, self.place, turns, first_trained=1)


@dataclass(frozen=True)
class TokensRecord:
    """Token ids as they are, with a loss weight for each: no template, no BOS, no EOS is put to them."""

    index: int
    place: str
    tokens: tuple[int, ...]
    weights: tuple[float, ...]


Record = ChatRecord | TextRecord | TokensRecord


def read_records(path: str | Path) -> list[Record]:
    """Read a JSON-lines file. Blank lines, a byte-order mark and CRLF line ends are tolerated.

    Raises:
        InputError: the file cannot be read or holds no record, or a line is not as above; the message names
            the file, the line, and the key.
    """
    records: list[Record] = []
    for number, text in _lines(Path(path)):
        if text:
            place = f"{path}, line {number}"
            records.append(_record(_json_object(text, place), len(records), place))
    if not records:
        raise InputError(f"{path} holds no records: write one JSON object a line")
    return records


def records_from_rows(rows: Iterable[Mapping[str, Any]], name: str = "data") -> list[Record]:
    """Records of rows already in memory; errors call the first `data[0]`.

    Raises:
        InputError: there are no rows, or one is not as above.
    """
    records = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(f"{name}[{index}]: expected a mapping, found {_kind(row)}; give messages or prompts")
        records.append(_record(row, index, f"{name}[{index}]"))
    if not records:
        raise InputError(f"{name} holds no records")
    return records


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines. Split at newlines alone: str.splitlines would also cut at U+2028 inside a string."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                try:
                    yield number, raw.decode("utf-8").strip()
                except UnicodeDecodeError as error:
                    raise InputError(f"{path}, line {number}: not UTF-8 text; save the file as UTF-8") from error
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); give a JSON-lines file") from error


def _json_object(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place}: not valid JSON ({error.msg} at column {error.colno}); write one JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or nesting as deep
        raise InputError(f"{place}: JSON that cannot be read ({error}); mend or remove the line") from error
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected a JSON object, found {_kind(value)}; write one JSON object a line")
    return value


def _record(row: Mapping[str, Any], index: int, place: str) -> Record:
    if "messages" in row:
        messages = _messages(row["messages"], f"{place}: messages")
        _check_answered(messages, f"{place}: messages")
        return ChatRecord(index, place, messages, tools=_tools(row, place))
    missing = [key for key in ("prompt", "completion") if key not in row]
    if missing:
        found = ", ".join(repr(key) for key in row) or "none"
        expected = f"{missing[0]!r}" if len(missing) == 1 else "'messages', or 'prompt' and 'completion'"
        raise InputError(f"{place}: no {expected} (keys found: {found}); rename or add the key")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _check_text(prompt, f"{place}: prompt")
        _check_text(completion, f"{place}: completion")
        if not completion.strip():
            raise InputError(f"{place}: completion is empty; fill it in or remove the line")
        return TextRecord(index, place, prompt, completion)
    before = _turns(prompt, "user", f"{place}: prompt")
    after = _turns(completion, "assistant", f"{place}: completion")
    _check_answered(after, f"{place}: completion")
    return ChatRecord(index, place, before + after, first_trained=len(before), tools=_tools(row, place))


def _tools(row: Mapping[str, Any], place: str) -> tuple[Any, ...] | None:
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{place}: tools must be a list of tool descriptions, found {_kind(tools)}")
    return tuple(tools) if tools else None


def _turns(value: Any, role: str, place: str) -> tuple[Message, ...]:
    """A list of messages as it is; a string as one message of `role`."""
    return _messages([{"role": role, "content": value}] if isinstance(value, str) else value, place)


def _messages(value: Any, place: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{place}: must be a non-empty list of messages, found {_kind(value)}")
    return tuple(_message(message, f"{place}[{number}]") for number, message in enumerate(value))


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise InputError(f"{place}: must be an object with 'role' and 'content', found {_kind(value)}")
    if "role" not in value:
        found = ", ".join(repr(key) for key in value) or "none"
        raise InputError(f"{place}: no 'role' (keys found: {found}); write 'role' and 'content'")
    role, content = value["role"], value.get("content")
    if role not in ROLES:
        instead = _OTHER_NAMES.get(role) if isinstance(role, str) else None
        mend = f"write {instead!r}" if instead else f"write one of {', '.join(ROLES)}"
        raise InputError(f"{place}.role: {role!r} is not a role; {mend}")
    if content is None and role == "assistant" and value.get("tool_calls"):
        return {**value, "content": ""}  # a turn that only calls tools
    if not isinstance(content, str):
        found = _kind(content) if "content" in value else "nothing"
        raise InputError(f"{place}.content: must be a string, found {found}")
    _check_text(content, f"{place}.content")
    if role == "assistant" and not content.strip() and not value.get("tool_calls"):
        raise InputError(f"{place}.content: an assistant turn is empty; fill it in or remove the line")
    return dict(value)


def _check_answered(messages: tuple[Message, ...], place: str) -> None:
    if all(message["role"] != "assistant" for message in messages):
        raise InputError(f"{place}: no assistant turn, so there is nothing to learn; add one or remove the line")


def _check_text(text: str, place: str) -> None:
    """JSON can spell half a surrogate pair (backslash-u d83d), which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{place}: {half} is half of a character; write the pair or remove it") from error


def _kind(value: Any) -> str:
    """The JSON name of a value's type, as a user would call it."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "an empty list" if value == [] else names.get(type(value), type(value).__name__)
