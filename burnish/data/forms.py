"""One function a form: a row that has the form's keys -> its record (docs/data.md).

Errors name the key; the place is put before them by `formats.read_row`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.data.messages import Turns, check_turns, read_turns, text_turn
from burnish.data.records import ChatRecord, Record, TextRecord, TokensRecord
from burnish.data.values import as_answer, as_list, as_text, is_number, kind, not_a_string, parsed, without_nulls
from burnish.errors import InputError

Row = Mapping[str, Any]

LEARNED_KEYS = ("labels", "loss_mask", "mask", "completion_mask", "assistant_masks")
_MOST_ID = 2**31 - 1
_NOT_LEARNED = -100  # PyTorch's ignore_index, and so the label of what is not learned


class DroppedRow(InputError):
    """A row that is sound but teaches nothing: to be counted by its `reason`, not to stop at."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)  # the arguments, so that it can be pickled
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def _messages(row: Row, index: int, place: str) -> Record:
    return _chat(row, index, place, [read_turns(row["messages"], "messages")])


def _conversations(row: Row, index: int, place: str) -> Record:
    turns = read_turns(row["conversations"], "conversations", sharegpt=True)
    return _chat(row, index, place, [turns], calls_in_text=True)


def _preference(row: Row, index: int, place: str) -> Record:
    """The prompt and the chosen answer. A prompt that both answers repeat, or only they have, is what they share."""
    prompt, chosen, rejected = row.get("prompt"), _cell(row["chosen"]), _cell(row["rejected"])
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            raise InputError("chosen and rejected are texts without a prompt; put the prompt in a column 'prompt'")
        if chosen == rejected:
            raise DroppedRow(place, "chosen and rejected are the same")
        return _answer(row, index, place, prompt, chosen, "chosen")
    better, worse = _turns(chosen, "assistant", "chosen"), _turns(rejected, "assistant", "rejected")
    if better.messages == worse.messages:
        raise DroppedRow(place, "chosen and rejected are the same")
    if prompt is not None and better.messages[0]["role"] not in ("system", "user"):
        return _answer(row, index, place, prompt, chosen, "chosen")
    shared = _shared_messages(better, worse)
    if prompt is None and shared == 0:
        raise InputError("chosen and rejected have no first message in common, so there is no prompt; add 'prompt'")
    if prompt is not None:
        asked, both = _turns(prompt, "user", "prompt").messages, better.messages[:shared]
        if asked not in (both[: len(asked)], both[-len(asked) :]):  # all of it, its first turn, or its last
            raise InputError("prompt is not what chosen and rejected both start with; remove it here or there")
    return _chat(row, index, place, [better], first_trained=shared)


def _prompt_completion(row: Row, index: int, place: str) -> Record:
    key = "response" if row.get("completion") is None and "response" in row else "completion"
    return _answer(row, index, place, row["prompt"], row[key], key)


def _alpaca(row: Row, index: int, place: str) -> Record:
    parts = [as_text(row["instruction"], "instruction")]
    if row.get("input") is not None:
        parts.append(as_text(row["input"], "input"))
    prompt, output = "\n\n".join(part for part in parts if part), as_answer(row["output"], "output")
    if row.get("history") in (None, "", []):
        return _answer(row, index, place, prompt, output, "output")
    turns = []
    for number, pair in enumerate(as_list(row["history"], "history", "a list of [question, answer] pairs")):
        at = f"history[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(f"{at}: must be a pair [question, answer], found {kind(pair)}")
        turns += [text_turn(pair[0], "user", at), text_turn(as_answer(pair[1], at), "assistant", at)]
    turns += [text_turn(prompt, "user", "instruction"), text_turn(output, "assistant", "output")]
    return _chat(row, index, place, turns)


def _question_answer(row: Row, index: int, place: str) -> Record:
    question, answer = as_text(row["question"], "question"), as_answer(row["answer"], "answer")
    return _answer(row, index, place, question, answer, "answer")


def _text(row: Row, index: int, place: str) -> Record:
    return TextRecord(index, place, "", as_answer(row["text"], "text"), raw=True)


def _tokens(row: Row, index: int, place: str) -> Record:
    ids = _integers(row["input_ids"], "input_ids")
    if not ids or min(ids) < 0:
        raise InputError(f"input_ids: must be token ids from 0, found {min(ids) if ids else 'none'}")
    learned = [key for key in LEARNED_KEYS if row.get(key) is not None]
    if len(learned) > 1:
        raise InputError(f"{' and '.join(learned)} all say what is learned; keep one")
    weights = _token_weights(row[learned[0]], learned[0], ids) if learned else [1.0] * len(ids)
    start, end = 0, len(ids)
    if row.get("attention_mask") is not None:
        start, end = _unpadded(_flags(row["attention_mask"], "attention_mask", len(ids)))
    return TokensRecord(index, place, tuple(ids[start:end]), tuple(weights[start:end]))


READERS: dict[str, Callable[[Row, int, str], Record]] = {
    "messages": _messages,
    "conversations": _conversations,
    "preference": _preference,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "question_answer": _question_answer,
    "text": _text,
    "tokens": _tokens,
}


def _answer(row: Row, index: int, place: str, prompt: Any, answer: Any, key: str) -> Record:
    """A prompt that is given and an answer, of column `key`, that is learned: strings or messages."""
    if isinstance(prompt, str) and isinstance(answer, str) and _system(row) is None and _tools(row) is None:
        return TextRecord(index, place, as_text(prompt, "prompt"), as_answer(answer, key))
    given, learned = _turns(prompt, "user", "prompt"), _turns(answer, "assistant", key)
    if learned.messages[: len(given.messages)] == given.messages:
        raise InputError(f"{key}: starts with the prompt again; leave the prompt out of it")
    return _chat(row, index, place, [given, learned], first_trained=len(given.messages))


def _chat(
    row: Row, index: int, place: str, stretches: Sequence[Turns], first_trained: int = 0, calls_in_text: bool = False
) -> ChatRecord:
    """The conversation of all stretches, with the system message and the tools that the row has beside them."""
    roles = check_turns(stretches, calls_in_text)
    messages = [message for turns in stretches for message in turns.messages]
    weights = [weight for turns in stretches for weight in turns.weights]
    if "assistant" not in roles[first_trained:]:
        key = stretches[-1].key
        raise InputError(f"{key}: no assistant turn, so there is nothing to learn; add one or remove the line")
    system = _system(row)
    if system is not None and messages[0]["role"] != "system":
        messages, weights = [{"role": "system", "content": system}, *messages], [None, *weights]
        first_trained += first_trained > 0
    elif system is not None and messages[0]["content"] != system:
        raise InputError(f"system: differs from the system message of {stretches[0].key}; keep one")
    unsaid = weights.count(None) == len(weights)
    return ChatRecord(index, place, tuple(messages), first_trained, _tools(row), () if unsaid else tuple(weights))


def _system(row: Row) -> str | None:
    system = row.get("system")
    return None if system is None else as_text(system, "system") or None


def _tools(row: Row) -> tuple[Any, ...] | None:
    tools = row.get("tools")
    if tools in (None, "", []):
        return None
    tools = as_list(without_nulls(tools, "tools"), "tools", "a list of tool descriptions")
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InputError(f"tools[{number}]: must be an object that describes a tool, found {kind(tool)}")
    return tuple(tools) or None


def _turns(value: Any, role: str, key: str) -> Turns:
    """A list of messages as it is; a string as one message of `role`."""
    if isinstance(value, list):
        return read_turns(value, key)
    if not isinstance(value, str):
        raise not_a_string(value, key, "a string or a list of messages")
    if role == "assistant" and key != "rejected":
        as_answer(value, key)
    return text_turn(value, role, key)


def _cell(value: Any) -> Any:
    """Messages, where a string holds them as JSON; else the value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = parsed(value, "", "")
    except InputError:  # an answer that begins with a bracket
        return value
    is_turns = isinstance(found, list) and found and all(isinstance(turn, dict) and "role" in turn for turn in found)
    return found if is_turns else value


def _shared_messages(better: Turns, worse: Turns) -> int:
    """How many messages two conversations start with in common, the last of either left out: that is the answer."""
    pairs = list(zip(better.messages[:-1], worse.messages[:-1], strict=False))
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _integers(value: Any, key: str) -> list[int]:
    numbers = as_list(value, key, "a list of whole numbers")
    if not set(map(type, numbers)) <= {int}:
        odd = next(number for number, item in enumerate(numbers) if type(item) is not int)
        raise InputError(f"{key}[{odd}]: must be a whole number, found {_number_kind(numbers[odd])}")
    if numbers and not -_MOST_ID <= min(numbers) <= max(numbers) <= _MOST_ID:
        raise InputError(f"{key}: holds a number that no token id can be; give ids of the model's tokenizer")
    return numbers


def _flags(value: Any, key: str, length: int) -> list[bool]:
    """A mask over `length` tokens."""
    flags = as_list(value, key, "a list of 0 and 1")
    _check_length(flags, key, length)
    if not set(map(type, flags)) <= {int, bool} or not set(flags) <= {0, 1}:
        odd = next(n for n, flag in enumerate(flags) if type(flag) not in (int, bool) or flag not in (0, 1))
        raise InputError(f"{key}[{odd}]: must be 0 or 1, found {_number_kind(flags[odd])}")
    return list(map(bool, flags))


def _number_kind(value: Any) -> str:
    return "another number" if is_number(value) else kind(value)


def _token_weights(value: Any, key: str, ids: list[int]) -> list[float]:
    if key != "labels":
        return [float(flag) for flag in _flags(value, key, len(ids))]
    labels = _integers(value, key)
    _check_length(labels, key, len(ids))
    pairs = enumerate(zip(labels, ids, strict=True))
    odd = [n for n, (label, token) in pairs if label != token and label != _NOT_LEARNED]
    if odd:
        raise InputError(
            f"labels[{odd[0]}]: {labels[odd[0]]}, but the input id is {ids[odd[0]]}; write the same id, or "
            f"{_NOT_LEARNED} where nothing is learned, and do not shift them"
        )
    return [0.0 if label == _NOT_LEARNED else 1.0 for label in labels]


def _check_length(values: list[Any], key: str, length: int) -> None:
    if len(values) != length:
        raise InputError(f"{key}: has {len(values)} entries for {length} input_ids; give one for each")


def _unpadded(attended: list[bool]) -> tuple[int, int]:
    """(start, end) of what is not padding."""
    if not any(attended):
        raise InputError("attention_mask: nothing but padding; remove the line")
    start, end = attended.index(True), len(attended) - attended[::-1].index(True)
    if not all(attended[start:end]):
        hole = attended.index(False, start)
        raise InputError(f"attention_mask[{hole}]: 0 between tokens; padding can only be at the ends")
    return start, end
