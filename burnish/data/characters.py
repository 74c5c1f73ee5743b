"""Characters that are seldom meant: control and invisible ones, traces of a wrong decoding, long runs of one.

"naÃ¯ve"    mojibake: UTF-8 that was read as Windows-1252        "na\\ufffdve"    bytes that were no text
"a\\u200bb"  nobody sees the space of no width between a and b    "=====..."       100 and more of one character
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f"  # all but \n and \t
# Soft hyphen, spaces of no width, line separators, direction marks of whole spans, byte-order mark. Joiners and the
# marks of single letters are left out: emoji and several scripts need them.
_INVISIBLE = "\xad\u200b\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U0010ffff"
# What Windows-1252 makes of the second and later bytes of a UTF-8 character.
_TAIL = "[\xa0-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"

_PATTERNS = {
    "control": re.compile(f"[{_CONTROL}]"),
    "invisible": re.compile(f"[{_INVISIBLE}]"),
    "replacement": re.compile("\ufffd"),
    "private_use": re.compile(f"[{_PRIVATE}]"),
    # Of two letters only pairs that no language writes; others count where one follows another.
    "mojibake": re.compile(f"[ÂÃ][\xa0-\xbf€]|â€|ðŸ|ï»¿|(?:[ÐÑ]{_TAIL}){{2}}|(?:[ã-é]{_TAIL}{{2}}){{2}}"),
    "long_run": re.compile(r"(.)\1{99}", re.DOTALL),
}
_IN_ASCII = ("control", "long_run")
_UNSEEN = re.compile(f"[{_CONTROL}{_INVISIBLE}{_PRIVATE}\ufffd]")

KINDS = {
    "control": "control characters",
    "invisible": "invisible characters",
    "replacement": "replacement characters, where bytes were no text",
    "private_use": "private-use characters",
    "mojibake": "mojibake, UTF-8 that was read as another encoding",
    "long_run": "100 and more of one character",
}
"""Kinds of odd characters, and what a report calls them."""


class Odd(NamedTuple):
    """An odd character: its kind, where in the text it is, and which."""

    kind: str
    at: int
    which: str


def odd_characters(text: str) -> Iterator[Odd]:
    """The first odd character of each kind that a text has."""
    for kind in _IN_ASCII if text.isascii() else _PATTERNS:
        found = _PATTERNS[kind].search(text)
        if found:
            yield Odd(kind, found.start(), _named(kind, found[0]))


def _named(kind: str, found: str) -> str:
    return repr(found) if kind == "mojibake" else f"U+{ord(found[0]):04X}"


def visible(text: str) -> str:
    """The text with what cannot be seen, or would act on a terminal, written out: "a⟨U+001B⟩b"."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def excerpt(text: str, width: int = 60, at: int = 0) -> str:
    """One line of at most `width` characters of a text (a few more where some are written out), around place `at`."""
    start = max(0, at - width // 3)
    end = start + width
    shown = visible(text[start:end].strip()).replace("\n", "⏎").replace("\t", "⇥")
    return f"{'…' if start else ''}{shown}{'…' if end < len(text) else ''}"
