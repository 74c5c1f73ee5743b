"""Another tool's file, read key by key, so that no key can be lost.

    keys = Keys({"sequence_len": 2048, "flash_attention": True}, draft)
    draft.put("data.max_length", keys.whole("sequence_len"))
    keys.close({"flash_*": "speed alone"})      # draft.unknown == [("flash_attention", "speed alone")]

A key that is read counts as translated, unless it is refused with a reason; `close` refuses whatever was not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

_NO_COUNTERPART = "not known to Burnish; see docs/recipe.md for what takes its place, or leave it out"


@dataclass
class Draft:
    """A recipe in the making, and what is to be said about it.

    Attributes:
        recipe: the tree of a recipe.
        translated: keys of the file, dotted, whose meaning the recipe has in full; a key stands for all below it.
        unknown: keys whose meaning it lacks, or has in part, each with why, and what to do.
        assumed: what the file does not say.
    """

    recipe: dict[str, Any] = field(default_factory=dict)
    translated: list[str] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Sets `section.key`, unless the value is None."""
        if value is None:
            return
        *sections, last = path.split(".")
        tree = self.recipe
        for section in sections:
            tree = tree.setdefault(section, {})
        tree[last] = value

    def put_or(self, path: str, value: Any, default: Any, source: str) -> None:
        """The same, with the other tool's default where the file says nothing, since Burnish's own differs."""
        self.put(path, default if value is None else value)
        if value is None:
            self.assume(f"{path}={default} ({source}'s default)")

    def assume(self, line: str) -> None:
        """Says something once."""
        if line not in self.assumed:
            self.assumed.append(line)


class Keys:
    """One mapping of the file. `place` is put before its keys in reports: `datasets[0].`"""

    def __init__(self, tree: Mapping[Any, Any], draft: Draft, place: str = "") -> None:
        self.tree = {str(key): value for key, value in tree.items()}
        self.place = place
        self._draft = draft
        self._reasons: dict[str, str | None] = {}  # of keys that were read; None: translated
        self._parts: dict[str, list[Keys]] = {}  # of keys whose own keys are read one by one

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        self._reasons.setdefault(key, None)
        return self.tree.get(key)

    def refuse(self, key: str, reason: str) -> None:
        """Lists a key, with all below it, as not understood. The first reason stays."""
        self._parts.pop(key, None)
        self._reasons[key] = self._reasons.get(key) or reason

    def has(self, key: str) -> bool:
        """Whether the file sets it; null does not."""
        return self.tree.get(key) is not None

    def text(self, key: str) -> str | None:
        """A string; None where it is empty as well."""
        return self._typed(key, lambda value: value if isinstance(value, str) else None, "a text") or None

    def flag(self, key: str) -> bool | None:
        """True or false, also as a word."""
        words = {"true": True, "false": False}
        return self._typed(
            key,
            lambda value: value if isinstance(value, bool) else words.get(str(value).lower()),
            "true or false",
        )

    def number(self, key: str) -> float | None:
        """A number, also as YAML reads `2e-4`: as a text."""
        return self._typed(key, _number, "a number")

    def whole(self, key: str) -> int | None:
        """A whole number, also 2.0 and "2"."""
        return self._typed(key, _whole, "a whole number")

    def names(self, key: str) -> list[str] | None:
        """A list of texts, or one text with commas."""
        return self._typed(key, _names, "a list of names")

    def section(self, key: str) -> "Keys | None":
        """A mapping below this one; None where it is empty as well."""
        found = self._typed(key, lambda value: value if isinstance(value, Mapping) else None, "a mapping")
        return None if not found else self.add_part(key, found, f"{self.place}{key}.")

    def sections(self, key: str) -> "list[Keys]":
        """A list of mappings, or one mapping; what is something else is refused."""
        value = self.get(key)
        items = value if isinstance(value, list) else [value] if value else []
        if not all(isinstance(item, Mapping) for item in items):
            self.refuse(key, "a list of mappings is expected")
            return []
        place = f"{self.place}{key}"
        if not isinstance(value, list):
            return [self.add_part(key, item, f"{place}.") for item in items]
        return [self.add_part(key, item, f"{place}[{number}].") for number, item in enumerate(items)]

    def add_part(self, key: str, tree: Mapping[Any, Any], place: str) -> "Keys":
        """Keys that are closed with these ones, under a key of their own or from another file."""
        part = Keys(tree, self._draft, place)
        self._parts.setdefault(key, []).append(part)
        return part

    def close(self, reasons: Mapping[str, str]) -> None:
        """Reports every key of the tree, and of its parts, as translated or as unknown.

        reasons: by pattern (`wandb_*`), of keys that nobody read. Such a key is a switch of something that Burnish does
        not have: where it is null, false, zero or empty, leaving it out means the same.
        """
        for key, value in self.tree.items():
            if key in self._parts:
                continue
            if key in self._reasons:
                reason = None if value is None else self._reasons[key]
            else:
                known = next((why for pattern, why in reasons.items() if fnmatchcase(key, pattern)), None)
                off = value is None or (known is not None and not value)
                reason = None if off else known or _NO_COUNTERPART
            if reason is None:
                self._draft.translated.append(self.place + key)
            else:
                self._draft.unknown.append((self.place + key, reason))
        if not self.tree and self.place:
            self._draft.translated.append(self.place.removesuffix("."))
        for part in (part for parts in self._parts.values() for part in parts):
            part.close(reasons)

    def _typed(self, key: str, read: Callable[[Any], Any], what: str) -> Any:
        value = self.get(key)
        if value is None:
            return None
        found = read(value)
        if found is None:
            self.refuse(key, f"{value!r:.60} is not {what}")
        return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return value if isinstance(value, int) else float(value)
    except ValueError:
        return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and float(number).is_integer() else None


def _names(value: Any) -> list[str] | None:
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        return None
    return [item for item in items if item]
