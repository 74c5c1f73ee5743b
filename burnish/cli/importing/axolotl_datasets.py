"""One entry of Axolotl's `datasets` -> rows as a recipe has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from burnish.cli.importing.keys import Draft, Keys
from burnish.cli.importing.sources import Rows, locate, message_form, renamed, suffix_of

_LOADERS = ("json", "csv", "parquet", "arrow", "text")  # a path that names how to read, not what
_CHAT_TYPES = ("chat_template", "sharegpt", "chat_template.default", "messages.chat")
_WORDED = (
    "rows are read, but worded by the chat template; Axolotl writes headings such as '### Instruction:'. "
    "For the same text set data.columns: {prompt: 'text with {column}', completion: ...}"
)
_ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}
# Forms of rows with fixed keys, whose text differs from the chat template's.
_WORDED_TYPES: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("alpaca", "alpaca_chat", "alpaca_instruct", "alpaca_w_system"), ("alpaca", _ALPACA)),
    **dict.fromkeys(("alpaca_chat.load_concise", "alpaca_w_system.load_instruct"), ("alpaca", _ALPACA)),
    "alpaca_w_system.load_chat": ("alpaca", _ALPACA),
    "alpaca_chat.load_qa": ("question_answer", {"question": "question", "answer": "answer"}),
    "gpteacher": ("alpaca", {**_ALPACA, "output": "response"}),
    "alpaca_w_system.load_open_orca": (
        "prompt_completion",
        {"prompt": "question", "completion": "response", "system": "system_prompt"},
    ),
}
ELSEWHERE = "an address that Burnish does not read; fetch the rows and name the file in data.path"
_UNKNOWN_TYPE = "not read by Burnish; rows are told by their keys (data.format: auto), or rewrite them as messages"
_ALIASES: dict[str, frozenset[str]] = {
    "system": frozenset({"system"}),
    "user": frozenset({"user", "human"}),
    "assistant": frozenset({"assistant", "gpt", "model", "bot", "chatgpt"}),
    "tool": frozenset({"tool", "function", "observation"}),
}


@dataclass(frozen=True)
class Dataset:
    """An entry's keys, for what a recipe says once for all data sets; and its rows."""

    keys: Keys
    rows: Rows


def read_dataset(keys: Keys, folder: Path, draft: Draft) -> list[Dataset]:
    """The entry, once for each of its files; nothing where its rows are in a place that Burnish cannot read."""
    form, columns = _read_type(keys, draft)
    if form not in ("text", "tokens", "auto"):
        columns = {"system": keys.text("field_system"), "tools": keys.text("field_tools"), **columns}
    _read_trained(keys)
    return _placed(keys, folder, draft, form, columns)


def read_raw_text(keys: Keys, folder: Path, draft: Draft) -> list[Dataset]:
    """An entry of `pretraining_dataset`: a column of text that is learned whole."""
    if keys.text("type") not in (None, "pretrain", "completion"):
        keys.refuse("type", "read as text that is learned whole")
    return _placed(keys, folder, draft, "text", {"text": keys.text("text_column") or keys.text("field") or "text"})


def _placed(keys: Keys, folder: Path, draft: Draft, form: str, columns: Mapping[str, str | None]) -> list[Dataset]:
    subset, split = keys.text("name"), keys.text("split")
    paths = _paths(keys, folder, draft)
    if split and "[" in split:
        keys.refuse("split", "a part of a split; all its rows are read, so cut the file")
        split = None
    if split not in (None, "train") and not any(path.startswith("hf:") for path in paths):
        keys.refuse("split", "a file is read whole; name the file of that split in `path`")
        split = None
    if subset and not any(path.startswith("hf:") for path in paths):
        keys.refuse("name", "of Hub data sets alone; a file is read whole")
        subset = None
    split = None if split == "train" else split
    return [Dataset(keys, Rows(path, form, renamed(**columns), subset=subset, split=split)) for path in paths]


def _paths(keys: Keys, folder: Path, draft: Draft) -> list[str]:
    path, files, kind = keys.text("path"), keys.names("data_files") or [], keys.text("ds_type")
    if path is None:
        draft.assume(f"{keys.place}path is missing: no rows are read for it; name them in data.path")
        return []
    names = [path]
    if files and (path in _LOADERS or (folder / path).is_dir() or Path(path).is_dir()):
        names = files if path in _LOADERS else [str(Path(path) / name) for name in files]
    elif files:
        keys.refuse("data_files", "a Hub data set is read by its split; fetch the files and name them in `path`")
    found = [place for name in names if (place := locate(name, folder))]
    if len(found) < len(names):
        keys.refuse("path", ELSEWHERE)
        return []
    if kind and any(suffix_of(place) not in (None, kind) for place in found):
        keys.refuse("ds_type", "a file is read by what its name ends in; rename it")
    return found


def _read_type(keys: Keys, draft: Draft) -> tuple[str, dict[str, str | None]]:
    """The form of the rows, and all its columns but those that any form may have."""
    given = keys.tree.get("type")
    if isinstance(given, Mapping) and (custom := keys.section("type")):
        return "prompt_completion", _custom_columns(custom, draft)
    kind = keys.text("type")
    if kind is None:
        return "auto" if given else "tokens", {}
    base = kind.split(":")[0].removesuffix(".load")
    if base in _CHAT_TYPES:
        return _chat_columns(keys, sharegpt=base == "sharegpt")
    if base == "completion":
        return "text", {"text": keys.text("field") or "text"}
    form, columns = _WORDED_TYPES.get(base, ("auto", {}))
    keys.refuse("type", _UNKNOWN_TYPE if form == "auto" else _WORDED)
    return form, {**columns}


def _chat_columns(keys: Keys, *, sharegpt: bool) -> tuple[str, dict[str, str | None]]:
    """Conversations: how their messages are written, and the column they are in."""
    role, content = ("from", "value") if sharegpt else ("role", "content")
    mapping = keys.get("message_property_mappings") or {}
    if not isinstance(mapping, Mapping):
        keys.refuse("message_property_mappings", "a mapping is expected")
    else:
        role, content = str(mapping.get("role", role)), str(mapping.get("content", content))
        others = {ours: theirs for ours, theirs in mapping.items() if ours not in ("role", "content")}
        if any(ours != theirs for ours, theirs in others.items()):
            keys.refuse("message_property_mappings", f"keys of a message keep their names ({others}); rename them")
    role, content = keys.text("message_field_role") or role, keys.text("message_field_content") or content
    form = message_form(role, content)
    if form is None:
        why = f"messages of {role}/{content} are not read; rename them to role/content or from/value"
        for key in ("message_property_mappings", "message_field_role", "message_field_content"):
            if keys.has(key):
                keys.refuse(key, why)
        form = "messages"
    if _read_roles(keys):
        form = "conversations"  # which reads ShareGPT's names of roles as well
    column = keys.text("field_messages") or ("conversations" if sharegpt else "messages")
    return form, {form: column}


def _read_roles(keys: Keys) -> bool:
    """Whether the rows call roles by other names, all of which Burnish knows."""
    roles = keys.get("roles")
    if roles is None:
        return False
    lists = isinstance(roles, Mapping) and all(isinstance(names, list) for names in roles.values())
    named = [(str(ours), str(name)) for ours, names in roles.items() for name in names] if lists else []
    if not lists or any(name not in _ALIASES.get(ours, ()) for ours, name in named):
        keys.refuse("roles", "roles that Burnish does not know by these names; rename them in the rows")
        return False
    return any(ours != name for ours, name in named)


def _read_trained(keys: Keys) -> None:
    """What of a conversation is learned: what is not the assistants' turns with their ends is refused."""
    roles = keys.names("roles_to_train")
    if roles is not None and not (roles and set(roles) <= _ALIASES["assistant"]):
        keys.refuse("roles_to_train", "data.train_on is for assistant turns, or all; or flag turns in the rows: train")
    for key in ("train_on_eos", "train_on_eot"):
        if key in keys.tree and keys.get(key) != "turn":
            keys.refuse(key, "the end of a turn is learned wherever the turn is, and nowhere else")
    if keys.text("message_field_training") not in (None, "train", "training", "weight"):
        keys.refuse("message_field_training", "a message says so in `train` (true, false) or `weight`; rename the key")
    if keys.flag("drop_system_message"):
        keys.refuse("drop_system_message", "system messages stay; take them out of the rows")
    if keys.text("field_thinking") not in (None, "reasoning_content", "thinking", "reasoning"):
        keys.refuse("field_thinking", "a message has it in `reasoning_content`; rename the key")


def _custom_columns(keys: Keys, draft: Draft) -> dict[str, str | None]:
    """A `type` that words the prompt itself."""
    theirs = {
        "instruction": keys.text("field_instruction") or "instruction",
        "input": keys.text("field_input") or "input",
    }
    worded, without = keys.text("format"), keys.text("no_input_format")
    text = worded or without or "{instruction}"
    if without and without != text:
        keys.refuse(
            "no_input_format", "every row gets the text of `format`; give rows without input a file of their own"
        )
    prompt = _replaced(text, theirs)
    if prompt is None:
        keys.refuse("format", "braces other than {instruction} and {input}; write it in data.columns.prompt")
        prompt = theirs["instruction"]
    system = keys.text("system_prompt") if not keys.has("field_system") else "{" + str(keys.text("field_system")) + "}"
    if system:
        fixed = system if keys.has("field_system") else system.replace("{", "{{").replace("}", "}}")
        around = keys.get("system_format")
        prompt = ("{system}" if around is None else str(around)).replace("{system}", fixed) + prompt
    if worded:
        keys.refuse(
            "format",
            "it is in data.columns.prompt, but a model with a chat template gets it as a user turn; Axolotl trains the "
            "bare text, as Burnish does without a template",
        )
    else:
        draft.assume(f"{keys.place}format: {text}")
    return {"prompt": prompt, "completion": keys.text("field_output") or "output"}


def _replaced(text: str, names: Mapping[str, str]) -> str | None:
    """The text with the columns' own names in its braces; None where the braces hold something else."""
    try:
        pieces = list(Formatter().parse(text))
    except ValueError:
        return None
    if any(name is not None and (name not in names or spec or conversion) for _, name, spec, conversion in pieces):
        return None
    doubled = ((literal.replace("{", "{{").replace("}", "}}"), name) for literal, name, _, _ in pieces)
    return "".join(literal + ("" if name is None else "{" + names[name] + "}") for literal, name in doubled)
