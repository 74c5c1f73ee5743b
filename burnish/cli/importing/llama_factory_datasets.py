"""LLaMA-Factory's dataset_info.json: data sets by name -> rows as a recipe has them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.cli.importing.keys import Draft, Keys
from burnish.cli.importing.sources import Rows, locate, message_form, renamed
from burnish.errors import InputError

_FILE = "dataset_info.json"
_PREFERENCE = "a pair of answers to choose from; the recipe is one for `burnish sft`, which learns the chosen one"
_MEDIA = "Burnish trains on text alone"
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model", "bot", "chatgpt"),
    "observation_tag": ("observation", "tool", "function"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
_SHAPES = ("alpaca", "sharegpt", "openai")
_JOINED = "read, but a blank line is put between instruction and input; LLaMA-Factory puts one line end"
_OWN_SYSTEM = "system messages in the rows' own `system` are read; dataset_info.json does not name them"


class Catalogue:
    """The entries of a dataset_info.json; None where there is none, and names are those of Hub data sets."""

    def __init__(self, keys: Keys, draft: Draft, path: Path | None, entries: Mapping[str, Any] | None) -> None:
        self._keys, self._draft, self._path, self._entries = keys, draft, path, entries
        self._parts: dict[str, Keys] = {}

    @classmethod
    def of(cls, keys: Keys, folder: Path, draft: Draft) -> "Catalogue":
        """The catalogue that `dataset_dir` names: from here, from the file's folder, or from a folder above it.

        Raises:
            InputError: it is there but no JSON object of entries.
        """
        named = keys.text("dataset_dir") or "data"
        if named == "ONLINE":
            return cls(keys, draft, None, None)
        near = (Path(), folder, *folder.resolve().parents)
        path = next((base / named / _FILE for base in near if (base / named / _FILE).is_file()), None)
        if path is None:
            if keys.has("dataset_dir"):
                keys.refuse("dataset_dir", f"no {_FILE} is there, which says what the data sets are")
            return cls(keys, draft, None, {})
        draft.assume(f"data sets are those of {path}")
        return cls(keys, draft, path, _read(path))

    def rows(self, key: str, *, raw: bool) -> list[Rows | None]:
        """The data sets that a key of the configuration names; None for one that cannot be read, which is reported."""
        names = self._keys.names(key) or []
        found = [self._rows(name, raw=raw) for name in names]
        lost = [name for name, rows in zip(names, found, strict=True) if rows is None]
        if lost:
            where = f"not read from {self._path}" if self._path else f"no {_FILE} says what they are"
            self._keys.refuse(
                key, f"{', '.join(lost)}: {where}; write data.path, data.format and data.columns yourself"
            )
        return found

    def _rows(self, name: str, *, raw: bool) -> Rows | None:
        if self._entries is None:
            form, columns = ("text", {"text": "instruction"}) if raw else ("alpaca", {})
            return Rows(f"hf:{name}", form, columns)
        entry = self._entries.get(name)
        if not isinstance(entry, Mapping):
            return None
        if name not in self._parts:
            self._parts[name] = self._keys.add_part(f"{_FILE}:{name}", entry, f"dataset_info.{name}.")
        return _entry_rows(self._parts[name], self._draft, (self._path or Path()).parent, raw=raw)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); mend it") from error
    if not isinstance(entries, dict):
        raise InputError(f"{path}: expected an object of data sets by name, found {type(entries).__name__}")
    return entries


def _entry_rows(keys: Keys, draft: Draft, folder: Path, *, raw: bool) -> Rows | None:
    path = _path(keys, folder)
    shape = keys.text("formatting")
    if shape not in (None, *_SHAPES):
        keys.refuse("formatting", "not known; rows are told by their keys (data.format: auto)")
    if keys.flag("ranking"):
        keys.refuse("ranking", _PREFERENCE)
    if keys.whole("num_samples"):
        keys.refuse("num_samples", "all rows are read; cut the file")
    columns = keys.section("columns")
    form, named = _columns(keys, columns, draft, shape or "alpaca", raw=raw)
    if path is None:
        return None
    subset, split = keys.text("subset"), keys.text("split")
    if not path.startswith("hf:"):
        for key in ("subset", "split"):
            if keys.text(key) not in (None, "train"):
                keys.refuse(key, "of Hub data sets alone; a file is read whole")
        subset = split = None
    return Rows(path, form, named, subset=subset, split=None if split == "train" else split)


def _path(keys: Keys, folder: Path) -> str | None:
    hub, file = keys.text("hf_hub_url"), keys.text("file_name")
    for key in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"):
        if keys.has(key):
            keys.refuse(key, "Burnish reads files, and Hugging Face's Hub (hf:ORG/NAME)")
    for key in ("folder", "revision"):
        if keys.has(key):
            keys.refuse(key, "the whole data set is read, as it is now; fetch that part and name the file")
    if hub:
        if file:
            keys.refuse("file_name", "hf_hub_url wins, there as here")
        return f"hf:{hub}"
    if file and "://" not in file:
        return str(folder / file)
    return locate(file, folder) if file else None


def _columns(keys: Keys, columns: Keys | None, draft: Draft, shape: str, *, raw: bool) -> tuple[str, dict[str, str]]:
    """The form and columns of an entry. Where `columns` are given, those that are not named are not read."""
    empty = Keys({}, draft)
    given = columns or empty
    for key in ("chosen", "rejected", "kto_tag"):
        if given.has(key):
            given.refuse(key, _PREFERENCE)
    for key in ("images", "videos", "audios"):
        if given.has(key):
            given.refuse(key, _MEDIA)
    if raw:
        return "text", renamed(text=given.text("prompt") or "instruction")
    system, tools = given.text("system"), given.text("tools")
    if system is None:
        draft.assume(_OWN_SYSTEM)
    if shape not in _SHAPES:
        return "auto", {}
    if shape != "alpaca":
        column = given.text("messages") or "conversations"
        form = _message_form(keys, openai=shape == "openai")
        return form, renamed(**{form: column}, system=system, tools=tools)
    names = _alpaca_names(given, all_read=columns is None)
    if columns is None:
        draft.assume(f"instruction and input: {_JOINED}")
    elif names["input"]:
        given.refuse("query", _JOINED)
    if names["input"] or names["history"]:
        return "alpaca", renamed(**names, system=system, tools=tools)
    return "prompt_completion", renamed(
        prompt=names["instruction"], completion=names["output"], system=system, tools=tools
    )


def _alpaca_names(columns: Keys, *, all_read: bool) -> dict[str, str | None]:
    theirs = {"instruction": "prompt", "input": "query", "output": "response", "history": "history"}
    named = {ours: columns.text(key) for ours, key in theirs.items()}
    if all_read:
        return {**named, "instruction": "instruction", "input": "input", "output": "output"}
    return {**named, "instruction": named["instruction"] or "instruction", "output": named["output"] or "output"}


def _message_form(keys: Keys, *, openai: bool) -> str:
    """How messages are written: by the tags, as far as these are names that Burnish reads."""
    tags = keys.section("tags") or Keys({}, Draft())
    role = tags.text("role_tag") or ("role" if openai else "from")
    content = tags.text("content_tag") or ("content" if openai else "value")
    form = message_form(role, content)
    if form is None:
        for key in ("role_tag", "content_tag"):
            if tags.has(key):
                tags.refuse(key, f"messages of {role}/{content} are not read; rename to role/content or from/value")
    names = {key: name for key in _TAGS if (name := tags.text(key))}
    for key, name in names.items():
        if name not in _TAGS[key]:
            tags.refuse(key, f"{name} is no name of that role here; rename it to {_TAGS[key][0]} in the rows")
    sharegpt = {name for known in _TAGS.values() for name in known} - {"user", "assistant", "system", "tool"}
    return "messages" if form == "messages" and sharegpt.isdisjoint(names.values()) else "conversations"
