"""A column of messages -> messages as chat templates read them, and what each says of its own loss weight.

    {"role": "assistant", "content": "4", "train": false}     OpenAI
    {"from": "gpt", "value": "4", "train": false}             ShareGPT
    ->  {"role": "assistant", "content": "4"}, weight 0.0

Keys that are not named here are kept for the template; keys whose value is null are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from burnish.data.chat import REASONING_KEYS
from burnish.data.records import ROLES, Message
from burnish.data.values import as_list, as_text, keys_found, kind, parsed, shown, without_nulls
from burnish.errors import InputError

_FLAGS = frozenset({"train", "training", "weight"})
_MOST_WEIGHT = 1e6
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
_OTHER_NAMES = _SHAREGPT | {"ai": "assistant", "developer": "system", "ipython": "tool"}


@dataclass
class Turns:
    """Messages of one column, and what each says of its weight: None where it says nothing."""

    key: str
    messages: list[Message]
    weights: list[float | None]


def read_turns(value: Any, key: str, sharegpt: bool = False) -> Turns:
    """The messages of column `key`: a list, or a list as JSON; ShareGPT's names are read where `sharegpt`.

    Raises:
        InputError: it is not such a list, or a message of it is not one.
    """
    what = "a non-empty list of messages"
    turns = as_list(value, key, what)
    if not turns:
        raise InputError(f"{key}: must be {what}, found an empty list")
    read = _sharegpt_message if sharegpt else _message
    read_them = Turns(key, [], [])
    for number, turn in enumerate(turns):
        message, weight = read(turn, f"{key}[{number}]")
        read_them.messages.append(message)
        read_them.weights.append(weight)
    return read_them


def text_turn(value: Any, role: str, key: str) -> Turns:
    """A string as the one message of `role`."""
    return Turns(key, [{"role": role, "content": as_text(value, key)}], [None])


def check_turns(stretches: Iterable[Turns], calls_in_text: bool = False) -> list[str]:
    """The roles of stretches of messages, one behind the other, where they are a conversation.

    `calls_in_text`: tools may be called in an answer's text, as ShareGPT has it.

    Raises:
        InputError: a second system message or one that is not first, a tool's result that nothing asked for, or an
            empty assistant turn.
    """
    roles: list[str] = []
    called = False
    for turns in stretches:
        for number, message in enumerate(turns.messages):
            role, calls = message["role"], "tool_calls" in message
            fault = None
            if role == "system" and "system" in roles:
                fault = ": a second system message; join them"
            elif role == "system" and roles:
                fault = ": a system message that is not first; move it to the start"
            elif role == "tool" and not called:
                fault = ": a tool turn, but no assistant turn before it has tool_calls; add the call"
            elif role == "assistant" and not calls and not message["content"].strip():
                fault = ".content: an assistant turn is empty; fill it in or remove the line"
            if fault:
                raise InputError(f"{turns.key}[{number}]{fault}")
            called = called or calls or (calls_in_text and role == "assistant")
            roles.append(role)
    return roles


def _message(value: Any, at: str) -> tuple[Message, float | None]:
    """A message of OpenAI's form, and its weight."""
    if isinstance(value, dict) and len(value) == 2:  # nearly all messages: no more to be checked than this
        role, content = value.get("role"), value.get("content")
        if isinstance(content, str) and content.isascii() and role in ROLES:
            return {"role": role, "content": content}, None
    message = _plain(value, at, "'role' and 'content'")
    if "role" not in message:
        mend = "write 'role' and 'content'"
        if "from" in message:
            mend += ", or read the column as data.columns: {conversations: messages}"
        raise InputError(f"{at}: no 'role' ({keys_found(value)}); {mend}")
    if (role := message["role"]) not in ROLES:
        instead = _OTHER_NAMES.get(role) if isinstance(role, str) else None
        mend = f"write {instead!r}" if instead else f"write one of {', '.join(ROLES)}"
        raise InputError(f"{at}.role: {shown(role)} is not a role; {mend}")
    if "tool_calls" in message:
        _normalise_calls(message, at)
    if "function_call" in message:
        raise InputError(f"{at}.function_call: the old name of a call; write it as tool_calls: [the call]")
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        content = "".join(_part(part, f"{at}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        found = kind(content) if "content" in value else "nothing"
        raise InputError(f"{at}.content: must be a string, found {found}")
    message["content"] = content
    for key in REASONING_KEYS:
        if key in message:
            as_text(message[key], f"{at}.{key}")
    return message, None if _FLAGS.isdisjoint(message) else _take_weight(message, at)


def _sharegpt_message(value: Any, at: str) -> tuple[Message, float | None]:
    """A message of ShareGPT's form, or of OpenAI's with the roles of either."""
    turn = dict(_plain(value, at, "'from' and 'value'"))
    name_key = "role" if "role" in turn else "from"
    if name_key not in turn:
        raise InputError(f"{at}: no 'from' ({keys_found(value)}); write 'from' and 'value', or 'role' and 'content'")
    name = turn[name_key]
    role = _SHAREGPT.get(name) if isinstance(name, str) else None
    if role is None:
        raise InputError(f"{at}.{name_key}: {shown(name)} is not a role; write one of {', '.join(_SHAREGPT)}")
    if name_key == "from":
        del turn["from"]
        if "value" not in turn:
            found = "null" if "value" in value else "nothing"
            raise InputError(f"{at}.value: must be a string, found {found}")
        said = turn.pop("value")
        if name == "function_call":
            calls = parsed(said, f"{at}.value", "a call as {name, arguments}")
            turn["tool_calls"] = calls if isinstance(calls, list) else [calls]
            if not turn["tool_calls"]:
                raise InputError(f"{at}.value: no call in it; write a call as {{name, arguments}}")
        else:
            turn["content"] = as_text(said, f"{at}.value")
    return _message({**turn, "role": role}, at)


def _plain(value: Any, at: str, keys: str) -> Message:
    """A copy of a message without nulls."""
    if not isinstance(value, dict):
        raise InputError(f"{at}: must be an object with {keys}, found {kind(value)}")
    message = {}
    for key, item in value.items():
        if item is not None:
            name = f".{key}" if as_text(key, at).isidentifier() else f"[{shown(key)}]"
            message[key] = without_nulls(item, at + name)
    return message


def _part(value: Any, at: str) -> str:
    """The text of a content part."""
    if not isinstance(value, dict):
        raise InputError(f"{at}: must be an object as {{type: text, text: ...}}, found {kind(value)}")
    if value.get("type") != "text":
        raise InputError(
            f"{at}.type: {shown(value.get('type'))}, but text only can be learned; remove the part or line"
        )
    return as_text(value.get("text"), f"{at}.text")


def _normalise_calls(message: Message, at: str) -> None:
    """Every call as {"type": "function", "function": {"name": ..., "arguments": {...}}}: what templates count on."""
    calls = as_list(message.pop("tool_calls"), f"{at}.tool_calls", "a list of calls")
    if not calls:
        return  # written where there are none
    if message["role"] != "assistant":
        raise InputError(f"{at}.tool_calls: in a {message['role']} turn; only an assistant turn can call tools")
    message["tool_calls"] = [_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _call(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{at}: must be an object as {{name, arguments}}, found {kind(value)}")
    if "function" not in value:
        rest = {key: item for key, item in value.items() if key not in ("name", "arguments")}
        flat = {key: value[key] for key in ("name", "arguments") if key in value}
        value = {"type": "function", **rest, "function": flat}
    function = value["function"]
    if not isinstance(function, dict):
        raise InputError(f"{at}.function: must be an object as {{name, arguments}}, found {kind(function)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InputError(f"{at}: a call without a name ({keys_found(function)}); write the function's 'name'")
    # Templates differ in what they do with a string: one quotes it, another does not.
    arguments = parsed(function.get("arguments", {}), f"{at}.arguments", "an object")
    if not isinstance(arguments, dict):
        raise InputError(f"{at}.arguments: must be an object, or JSON of one, found {kind(arguments)}")
    return {**value, "function": {**function, "arguments": arguments}}


def _take_weight(message: Message, at: str) -> float | None:
    """What a message says of its weight, taken out of it."""
    trained = {key: message.pop(key) for key in ("train", "training") if key in message}
    for key, value in trained.items():
        if not isinstance(value, bool):
            raise InputError(f"{at}.{key}: must be true or false, found {shown(value)}; a number goes in 'weight'")
    if len(set(trained.values())) == 2:
        raise InputError(f"{at}: train and training differ; keep one")
    train = next(iter(trained.values()), None)
    weight = message.pop("weight", None)
    if weight is None:
        return None if train is None else float(train)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _MOST_WEIGHT:
        found = shown(weight) if not isinstance(weight, float) else f"{weight:g}"
        raise InputError(f"{at}.weight: must be a number from 0 to {_MOST_WEIGHT:.0f}, found {found}")
    if train is not None and train != (weight > 0):
        raise InputError(f"{at}: train is {str(train).lower()}, but weight is {weight:g}; keep one of them")
    return float(weight)
